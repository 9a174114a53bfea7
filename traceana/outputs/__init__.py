"""Results -> text and files. No arithmetic; every file is written whole or not at all."""

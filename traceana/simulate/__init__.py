"""What a change would do: pieces measured in a capture, played through SGLang's pipeline loop again."""

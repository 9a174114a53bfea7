"""What belongs together, within a rank and across ranks, told by order and ids alone: no clock is needed here."""

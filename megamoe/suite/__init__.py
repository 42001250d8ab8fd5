"""The oracle's suite: cases sent to pools of real rank processes, and their verdicts as records."""

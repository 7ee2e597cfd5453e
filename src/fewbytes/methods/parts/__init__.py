"""What several methods share: functions and parts, never a base class."""

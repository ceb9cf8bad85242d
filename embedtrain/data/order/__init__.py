"""Which rows make up batch k, and what is drawn of each: functions of the seed and the step alone."""

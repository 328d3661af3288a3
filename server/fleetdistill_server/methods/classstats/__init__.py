"""Server half of class statistics: the merge of device statistics, and checks against hostile devices."""

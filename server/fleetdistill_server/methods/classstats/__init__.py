"""Server half of class statistics: both forms, the merge of device statistics, and checks against hostile devices."""

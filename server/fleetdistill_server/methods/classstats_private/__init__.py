"""Server half of private class statistics: the screening and the merge of noisy sums."""

"""The cost model: QPS, memory and imbalance of clusters nobody here has, labelled ``modelled``; imports no torch."""

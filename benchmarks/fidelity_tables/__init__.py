"""Published tables of measured configurations, rebuilt row by row as workloads.

One file a table; `registry.TABLES` lists them. A table's function translates columns into a graph,
a cluster, an instance and a uniform plan, and says what it leaves out and why.
"""

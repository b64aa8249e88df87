"""The prediction of whole clusters in virtual time: throughput, idle time, staleness, KV use."""

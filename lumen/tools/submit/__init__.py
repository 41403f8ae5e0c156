"""`lumen submit`: writes the job file of a cluster's own engine, and gives it to that."""

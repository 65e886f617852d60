"""The search as a job: from files to a front, a policy and a configuration to serve with. The only room of tuning that
knows Ray."""

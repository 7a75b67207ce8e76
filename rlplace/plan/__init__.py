"""THE QUESTION AND THE DECISION: instances, plans, their check, files and schedules."""

"""What a tuning job found, as one page for somebody who must defend the bill."""

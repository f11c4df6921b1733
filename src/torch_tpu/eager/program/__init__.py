"""What a call becomes: its signature, the plan that is made of it once, where plans are kept, and how one is run."""

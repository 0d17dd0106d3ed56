"""`tutti simulate`: many servers, drives and tiers in virtual time."""

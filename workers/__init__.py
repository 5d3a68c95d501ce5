"""Who computes: guardians, the pull loop and the stage engines."""

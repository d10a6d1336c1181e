//! The loops, and the agent as a process.

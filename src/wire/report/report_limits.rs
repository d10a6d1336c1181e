//! Limits of a report.

/// Most processes of one device in a report.
pub const MAX_PROCESSES_PER_DEVICE: usize = 4096;

/// Longest instance id of an agent, pod UID or MIG profile, in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// Most streaming multiprocessors (SMs) that are accepted: a hundred times those of GPUs of 2026.
pub const MAX_SM_COUNT: u32 = 16_384;

/// Most profiles of MIG instances that a GPU can have; NVML numbers 17 in 2026.
pub const MAX_MIG_PROFILES: usize = 32;

/// Most units at which instances of a profile may begin; in 2026 a GPU has 7 at most.
pub const MAX_MIG_STARTS: usize = 16;

/// Most failed orders in a report: 9 GPUs with 7 instances each have fewer.
pub const MAX_MIG_FAILURES: usize = 64;

/// Most promised instances in a report: 16 GPUs with 7 instances each have fewer.
pub const MAX_MIG_PROMISES: usize = 128;

/// Most containers in a report: 16 GPUs with 30 pods of two containers each have fewer.
pub const MAX_CONTAINERS: usize = 1024;

/// Longest error of a failed order, in bytes.
pub const MAX_MIG_ERROR_BYTES: usize = 512;

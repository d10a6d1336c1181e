//! The `gpupack` program.
fn main() {}

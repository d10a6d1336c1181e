//! What holds for the sources themselves.

/// What the commands of the top level cover, and what the agent is made of.
mod crates;
/// The order of the files.
mod layering;
/// Look, names, links, and documents that name everything.
mod tidy;
/// The files of the repository, and Rust text as words.
mod source;

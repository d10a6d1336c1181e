//! libFuzzer over one target of `targets/`, named by the variable `FUZZ_TARGET`. One program for all of them is
//! linked once.

#![no_main]

use std::alloc::System;
use std::sync::OnceLock;

use cap::Cap;
use libfuzzer_sys::fuzz_target;

mod targets;

use targets::{LONGEST_INPUT, TARGETS, Target};

/// Counts bytes, and gives no more than allowed.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Most bytes that the work on one input may take at a time.
const MOST_BYTES: usize = 32 << 20;

static CHOSEN: OnceLock<Target> = OnceLock::new();

fn choose() {
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let Some(target) = TARGETS.into_iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
        eprintln!("FUZZ_TARGET is `{name}`; there are {}", known.join(", "));
        std::process::exit(2);
    };
    CHOSEN.get_or_init(|| target);
    // To say where a target failed takes more memory than an input may.
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |failure| {
        MEMORY.set_limit(usize::MAX).expect("there is no larger number");
        told(failure);
    }));
}

fuzz_target!(init: choose(), |data: &[u8]| {
    let (_, target) = CHOSEN.get().expect("it is chosen before the first input");
    if data.len() <= LONGEST_INPUT {
        MEMORY.set_limit(MEMORY.allocated() + MOST_BYTES).expect("the limit is above what is held");
        target(data);
        MEMORY.set_limit(usize::MAX).expect("there is no larger number");
    }
});

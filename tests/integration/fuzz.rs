//! What is read from outside, without a fuzzer: the kept corpus of `tests/fuzz` is replayed, and changed at random.
//! Longer: `FUZZ_MS=60000 cargo test --test integration fuzz::`.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use runtime::clock::Clock;

#[path = "../fuzz/targets/mod.rs"]
mod targets;

use targets::{LONGEST_INPUT, TARGETS, Target};

/// How long changed inputs of one target are tried: half a minute for all of them.
const TRIED_FOR: Duration = Duration::from_secs(2);

/// The words of all formats.
const WORDS: &str = include_str!("../fuzz/words");

/// The kept inputs of a target, in the order of their names.
fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(name);
    let entries = std::fs::read_dir(&folder).expect("each target has a corpus");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("it is readable").path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("it is readable")).collect()
}

/// Runs a target; says with which input it failed.
fn run((name, target): Target, input: &[u8]) {
    if let Err(failure) = catch_unwind(AssertUnwindSafe(|| target(input))) {
        // Past the capture of the test harness.
        let _ = writeln!(std::io::stderr(), "target `{name}`: \"{}\"", input.escape_ascii());
        resume_unwind(failure);
    }
}

#[test]
fn kept_inputs_of_every_target_hold() {
    for target in TARGETS {
        let inputs = corpus(target.0);
        assert!(inputs.len() > 2, "`{}` has a corpus", target.0);
        inputs.iter().for_each(|input| run(target, input));
    }
}

#[test]
fn changed_inputs_of_every_target_hold() {
    let tried_for = variable("FUZZ_MS").map_or(TRIED_FOR, Duration::from_millis);
    for target in TARGETS {
        let (inputs, clock) = (corpus(target.0), Clock::start());
        let mut chance = ChaCha8Rng::seed_from_u64(1);
        let mut count = 0_u64;
        while clock.precise() < tried_for {
            run(target, &changed(&inputs, &mut chance));
            count += 1;
        }
        let _ = writeln!(std::io::stderr(), "{:<11} {count:>7} changed inputs", target.0);
    }
}

#[expect(clippy::disallowed_methods, reason = "how long a test searches is no configuration")]
fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// One of the inputs with one to four changes.
fn changed(inputs: &[Vec<u8>], chance: &mut ChaCha8Rng) -> Vec<u8> {
    let mut input = inputs[chance.random_range(0..inputs.len())].clone();
    for _ in 0..chance.random_range(1..=4) {
        let at = chance.random_range(0..=input.len());
        let end = (at + chance.random_range(0..=16)).min(input.len());
        match chance.random_range(0..6) {
            0 => drop(input.drain(at..end)),
            1 => {
                let again = input[at..end].to_vec();
                input.splice(at..at, again);
            }
            2 => {
                let words = WORDS.lines().collect::<Vec<_>>();
                let word = words[chance.random_range(0..words.len())].bytes();
                input.splice(at..end, word);
            }
            3 => {
                let number = [0, 1, 127, 255, 65_536, u64::MAX][chance.random_range(0..6)];
                input.splice(at..end, number.to_string().into_bytes());
            }
            4 => {
                let other = &inputs[chance.random_range(0..inputs.len())];
                let from = chance.random_range(0..=other.len());
                let to = (from + 64).min(other.len());
                input.splice(at..at, other[from..to].iter().copied());
            }
            _ => {
                if let Some(byte) = input.get_mut(at) {
                    *byte = chance.random();
                }
            }
        }
    }
    input.truncate(LONGEST_INPUT);
    input
}

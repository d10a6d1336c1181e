//! Proves the checks: each fault of `src/wire/mutation.rs` has to be noticed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use wire::mutation::{Mutation, mutate};

use super::minimize::{minimize, run};
use super::settings::{Settings, number, of_kind, text};

/// Seeds within which each is to be noticed.
const SEEDS: u64 = 1_000;

/// The first seed that notices it, and how.
fn caught(fault: Mutation, seeds: std::ops::Range<u64>) -> Option<(Settings, String)> {
    mutate(Some(fault));
    let step = usize::try_from(number("SIM_STEP").unwrap_or(1)).expect("small");
    let mut all = seeds.step_by(step).map(Settings::of).filter(of_kind());
    let found = all.find_map(|settings| {
        let is_traced = text("SIM_TRACED").is_some();
        let broken = run(&settings, is_traced).err()?;
        Some((settings, broken))
    });
    mutate(None);
    found
}

/// What was broken, without the seed.
fn first_line(broken: &str) -> String {
    let broken = broken.split_once(": ").map_or(broken, |(_, broken)| broken);
    broken.lines().next().unwrap_or_default().chars().take(150).collect()
}

#[test]
fn each_mutation_is_caught() {
    let only = text("SIM_MUTATION");
    let is_named =
        |only: &str, fault: Mutation| only.split(',').any(|name| name == format!("{fault:?}"));
    let chosen = |fault: &&Mutation| only.as_ref().is_none_or(|only| is_named(only, **fault));
    let first = number("SIM_FROM").unwrap_or(0);
    let seeds = first..first + number("SIM_SEEDS").unwrap_or(SEEDS);
    let chosen: Vec<&Mutation> = Mutation::ALL.iter().filter(chosen).collect();
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(fault) = chosen.get(next.fetch_add(1, Relaxed)) {
            let found = caught(**fault, seeds.clone());
            if let Some((_, broken)) = found.as_ref().filter(|_| text("SIM_TRACED").is_some()) {
                println!("{broken}");
            }
            let (seed, broken) = found.map_or_else(Default::default, |(settings, broken)| {
                (settings.seed.to_string(), first_line(&broken))
            });
            println!("| `{fault:?}` | {} | {seed} | {broken} |", fault.text().trim());
            if seed.is_empty() {
                missed.lock().expect("no panic").push(**fault);
            }
        }
    };
    std::thread::scope(|scope| {
        (0..number("SIM_THREADS").unwrap_or(2)).for_each(|_| _ = scope.spawn(work));
    });
    let missed = missed.into_inner().expect("no panic");
    assert_eq!(missed, [], "not noticed");
}

#[test]
fn a_failure_is_made_smaller() {
    let (failing, _) = caught(Mutation::UndecidedForgotten, 0..50).expect("it is noticed");
    mutate(Some(Mutation::UndecidedForgotten));
    let smallest = minimize(&failing, 150);
    let broken = run(&smallest, false);
    mutate(None);
    assert!(broken.is_err(), "the smallest run still fails");
    assert!(smallest.faults.len() < failing.faults.len() / 2, "{}", smallest.command());
    assert_eq!(run(&smallest, false).map(drop), Ok(()), "without the fault it passes");
}

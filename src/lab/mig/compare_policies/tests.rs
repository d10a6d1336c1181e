//! Small fleets, where the order of the policies shows already.

use std::num::NonZeroUsize;

use super::*;
use crate::mig::series::Bounds;

fn comparing(worlds: &[&str], load: Option<f64>, jobs: usize) -> Comparing {
    Comparing {
        worlds: worlds.iter().map(|name| name.parse().unwrap()).collect(),
        gpus: NonZeroUsize::new(12).unwrap(),
        load,
        seeds: vec![3, 4],
        policies: MigPolicy::ALL.to_vec(),
        bounds: Bounds::All,
        jobs: NonZeroUsize::new(jobs),
    }
}

#[test]
fn no_policy_allocates_more_than_the_bound() {
    let found = compare(comparing(&["uniform", "small", "models-80-20"], None, 2));
    for run in found.runs.iter().flatten() {
        let most = run.bounds[0].1;
        assert!((70.0..=100.0).contains(&most), "{run:?}");
        assert!(run.figures.iter().all(|part| *part <= most + 1e-6), "{run:?}");
        assert!(run.figures.iter().all(|part| *part > 50.0), "{run:?}");
        assert!(run.first_losses.iter().all(|load| (30.0..150.0).contains(load)), "{run:?}");
    }
}

#[test]
fn no_policy_blocks_less_than_the_lower_bound() {
    let found = compare(comparing(&["middle", "threes-ones7"], Some(1.3), 2));
    for world in &found.runs {
        let of = |figure: &dyn Fn(&MigRun) -> f64| {
            world.iter().map(figure).sum::<f64>() / world.len() as f64
        };
        let (least, free) = (of(&|run| run.bounds[0].1), of(&|run| run.bounds[1].1));
        assert!(least > 10.0 && free >= least, "{least} {free}");
        for (at, policy) in MigPolicy::ALL.iter().enumerate() {
            assert!(of(&|run| run.figures[at]) > least, "{policy:?}");
        }
        let [ours, moved] = [0, 1].map(|at| of(&|run| run.figures[at]));
        assert!(moved < ours, "a move makes room: {moved} {ours}");
        assert!(of(&|run| run.moves[1]) > 0.5);
    }
}

#[test]
fn the_output_is_the_same_whatever_the_threads() {
    let worlds = ["bimodal", "models-80-20"];
    for load in [None, Some(0.9)] {
        let [one, three] = [1, 3].map(|jobs| compare(comparing(&worlds, load, jobs)));
        assert_eq!(one.json(), three.json());
        assert_eq!(one.table(), three.table());
        assert_eq!(one.csv(), three.csv());
        // two worlds, two seeds, the policies and the bounds, and the head
        let bounds = if load.is_some() { 2 } else { 1 };
        assert_eq!(one.csv().lines().count(), 2 * 2 * (6 + bounds) + 1);
        let parsed: Value = serde_json::from_str(&one.json()).unwrap();
        assert_eq!(parsed["results"].as_array().unwrap().len(), 2 * 2 * (6 + bounds));
    }
}

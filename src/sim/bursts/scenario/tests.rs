use super::*;
use crate::hardware::pool::Borrow;

fn rule(borrow: Borrow, spread_empty: bool) -> PoolRule {
    PoolRule { borrow, spread_empty, ..PoolRule::default() }
}

const MEMORY: Borrow = Borrow::Memory { most: Share::WHOLE };

fn named(figures: &Figures) -> BTreeMap<&'static str, f64> {
    figures.named().into_iter().collect()
}

#[test]
fn who_lends_memory_refuses_fewer_bursts_and_no_pod_waits_longer() {
    let setting = Setting { load: 0.63, warm_up: 1, days: 2, seed: 42 };
    let none = play(setting, rule(Borrow::None, false));
    let memory = play(setting, rule(MEMORY, true));
    let (none, memory) = (named(&none), named(&memory));
    assert!((17.0..23.0).contains(&none["refused_percent"]), "one of five wants more: {none:?}");
    assert_eq!((none["recalls"], none["give_backs"], none["lost"]), (0.0, 0.0, 0.0));
    assert!(memory["refused_percent"] < none["refused_percent"] - 2.0, "{memory:?}");
    assert!(memory["served_percent"] > none["served_percent"], "{none:?} {memory:?}");
    assert!(memory["recalls"] > 0.0 && memory["give_backs"] > 0.0, "{memory:?}");
    let waiting = memory["whole_waiting_percent"] - none["whole_waiting_percent"];
    assert!(waiting < 3.0, "{none:?} {memory:?}");
}

#[test]
fn a_seed_gives_the_same_figures() {
    let setting = Setting { load: 0.7, warm_up: 0, days: 1, seed: 7 };
    let [one, two] = [(); 2].map(|()| play(setting, rule(MEMORY, false)).named());
    assert_eq!(one, two);
}

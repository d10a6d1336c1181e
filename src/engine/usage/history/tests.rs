use std::collections::BTreeMap;

use super::*;
use crate::hardware::pool::{Borrow, PoolRule, PoolRules};
use crate::hardware::spots::Spot;
use crate::ledger::change::facts::PodFact;
use crate::ledger::ledger_fixture::{bound, ledger, seconds, uid, uses};
use crate::ledger::nodes::state::Ledger;
use crate::ledger::usage::advice::{Bursts, PoolAdvice, by_pool};
use crate::model::isolation::{DriverLimits, Rules};
use crate::model::request::{Limit, Movable};
use crate::usage::node_details::DetailsReport;
use wire::ids::{DeviceId, MigProfile, PoolName};
use wire::seen::ReportedTenant;

fn note(ledger: &Ledger, seen: &[DeviceUse], at: u64) {
    note_reported(ledger, seen, BTreeMap::new(), at);
}

/// Includes what the driver reports of the pods on A.
fn note_reported(
    ledger: &Ledger,
    seen: &[DeviceUse],
    reported: BTreeMap<PodUid, ReportedTenant>,
    at: u64,
) {
    let rules = Rules {
        tolerance: MemMib::ZERO,
        limits: DriverLimits::Unused,
        grace: Duration::ZERO,
        max_limit: Share::WHOLE,
    };
    let tenants = BTreeMap::from([(DeviceId::new("A").unwrap(), reported)]);
    let report = DetailsReport { tenants, ..DetailsReport::default() };
    ledger.note("n", seen, report, rules, seconds(at));
}

/// A list of A: what `p` uses (none: no process), and how busy the GPU is.
fn list(ledger: &Ledger, mib: Option<u64>, busy_percent: Option<u8>, at: u64) {
    let mut seen = uses("A", &[]);
    seen[0].busy_percent = busy_percent;
    let process = |mib| ProcessUse { pod: Some(uid("p")), memory: Some(MemMib::new(mib)) };
    seen[0].processes = Some(mib.map(process).into_iter().collect());
    note(ledger, &seen, at);
}

/// The ledger with one GPU of 1000 MiB; `p` has half of it.
fn tenanted() -> Ledger {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 500_000), Timestamp::START);
    ledger
}

#[test]
fn samples_are_summarized_before_advice_is_given() {
    let ledger = tenanted();
    for at in 0..100 {
        let mib = if at < 95 { 100 } else { 230 };
        list(&ledger, Some(mib), Some(7), at * 5);
    }
    assert_eq!(ledger.advice(seconds(599)), [], "not watched for long enough");
    list(&ledger, Some(0), Some(7), 600);
    let all = ledger.advice(seconds(700));
    let [advice] = &all[..] else { panic!("{all:?}") };
    assert_eq!((advice.usage.peak, advice.allocated), (MemMib::new(230), MemMib::new(500)));
    assert_eq!(advice.usage.percentile(50), Share::from_millionths(250_000), "100 of 500");
    assert_eq!(advice.usage.percentile(99), Share::from_millionths(500_000), "230 of 500");
    assert_eq!(advice.usage.enough(), MemMib::new(256), "230 and a tenth, in steps of 256");
    assert_eq!((advice.is_idle(), advice.reclaimable()), (false, MemMib::new(244)));
    assert_eq!(advice.reclaimable_share(), Share::from_millionths(244_000));
    let pools = by_pool(&all);
    let borrow = Borrow::None;
    let wanted = PoolAdvice { tenants: 1, by_memory: 3, by_load: Some(14), borrow, borrowers: 0 };
    assert_eq!(pools.values().collect::<Vec<_>>(), [&wanted], "1000 over 256; 7 % busy");
}

#[test]
fn pods_that_use_borrowed_memory_are_named() {
    let memory = Borrow::Memory { most: Share::WHOLE };
    for (borrow, movable, peak, bursts) in [
        (memory, Movable::Restart, 500, None),
        (memory, Movable::Restart, 501, Some(Bursts::WithinLimit)),
        (memory, Movable::Restart, 760, Some(Bursts::AtLimit)), // 95 % of 800
        (memory, Movable::Never, 760, None),
        (Borrow::Compute, Movable::Restart, 760, None),
    ] {
        let ledger = ledger("A");
        let rule = PoolRule { borrow, ..PoolRule::default() };
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        let fact = bound("p", "n", "A", 500_000);
        let mut request = (**fact.request.as_ref().unwrap()).clone();
        request.limit = Some(Limit::Fraction(Share::from_millionths(800_000)));
        request.movable = movable;
        ledger.see_pod(&PodFact { request: Some(request.into()), ..fact }, Timestamp::START);
        for at in 0..130 {
            list(&ledger, Some(if at == 60 { peak } else { 100 }), Some(7), at * 5);
        }
        let all = ledger.advice(seconds(650));
        assert_eq!(all[0].bursts(), bursts, "{borrow:?} {movable:?} {peak}");
        let pool = by_pool(&all).into_values().next().unwrap();
        let may_borrow = usize::from(movable == Movable::Restart);
        assert_eq!((pool.borrow, pool.borrowers), (borrow, may_borrow));
    }
}

#[test]
fn a_pod_is_idle_when_its_gpus_have_not_been_busy_for_long() {
    for (mib, busy, is_idle) in [
        (Some(400), Some(0), true),
        (Some(400), Some(1), false),
        (Some(400), None, false), // MIG reports no load
        (None, Some(99), true),   // others are busy there
    ] {
        let ledger = tenanted();
        for at in 0..=130 {
            list(&ledger, mib, busy, at * 5);
        }
        let advice = ledger.advice(seconds(650)).remove(0);
        assert_eq!(advice.is_idle(), is_idle, "{mib:?} {busy:?}");
        let free = if is_idle { 500 } else { 0 }; // 512 would be enough
        assert_eq!(advice.reclaimable(), MemMib::new(free), "{mib:?} {busy:?}");
    }
}

#[test]
fn a_pod_that_is_to_be_restarted_elsewhere_may_still_use_its_own_gpu() {
    for is_at_home in [false, true] {
        let ledger = ledger("A B");
        ledger.see_pod(&bound("p", "n", "A", 500_000), Timestamp::START);
        let b = DeviceId::new("B").unwrap();
        let spot = Spot { gpu: b.clone(), profile: MigProfile::new("1g.5gb"), start: 0 };
        ledger.change_guest(&uid("p"), |node_state| node_state.move_out(&uid("p"), b, spot));
        for at in 0..=130 {
            let [mut seen, other] = ["A", "B"].map(|id| uses(id, &[]).remove(0));
            let process = ProcessUse { pod: Some(uid("p")), memory: Some(MemMib::new(400)) };
            let shows = is_at_home && at == 100;
            seen.processes = Some(if shows { vec![process] } else { Vec::new() });
            note(&ledger, &[seen, other], at * 5);
        }
        assert_eq!(ledger.advice(seconds(650)).remove(0).is_idle(), !is_at_home);
    }
}

#[test]
fn on_a_shared_gpu_a_pod_without_kernels_is_idle() {
    for (own, is_idle, load) in [
        (Some(0), true, Some(0)), // its process exists, and others run there
        (Some(1), false, Some(10_000)),
        (Some(100), false, Some(1_000_000)),
        (None, false, Some(600_000)), // an agent of an older release
    ] {
        let ledger = shared();
        let mut seen = uses("A", &["p", "q"]);
        seen[0].busy_percent = Some(90);
        let known = |process: &mut ProcessUse| process.memory = Some(MemMib::new(1));
        seen[0].processes.as_mut().unwrap().iter_mut().for_each(known);
        for at in 0..=130 {
            let reported =
                |busy_percent| ReportedTenant { busy_percent, ..ReportedTenant::default() };
            let reported = [("p", reported(own)), ("q", reported(Some(90)))];
            let reported = reported.map(|(pod, reported)| (uid(pod), reported)).into();
            note_reported(&ledger, &seen, reported, at * 5);
        }
        let all = ledger.advice(seconds(650));
        let advice = all.iter().find(|advice| advice.pod.uid == uid("p")).unwrap();
        assert_eq!(advice.is_idle(), is_idle, "{own:?}");
        assert_eq!(advice.usage.mean_load().map(Share::millionths), load, "{own:?}");
    }
}

#[test]
fn unknown_and_past_driver_values_are_dropped() {
    let ledger = tenanted();
    let mut seen = uses("A", &["p"]);
    note(&ledger, &seen, 0); // memory of the process: not known
    seen[0].processes = None;
    note(&ledger, &seen, 1);
    assert!(ledger.details("n").usages.of(&uid("p")).is_none());
    list(&ledger, Some(9), None, 2);
    assert!(ledger.details("n").usages.of(&uid("p")).is_some());
    ledger.end_pod(&uid("p"), seconds(3));
    list(&ledger, None, None, 4);
    ledger.tick(seconds(1_000));
    note(&ledger, &seen, 1_001);
    assert!(ledger.details("n").usages.of(&uid("p")).is_none());
}

/// A ledger of two pods on one GPU: `p` has half of it, `q` a quarter.
fn shared() -> Ledger {
    let ledger = tenanted();
    ledger.see_pod(&bound("q", "n", "A", 250_000), Timestamp::START);
    ledger
}

#[test]
fn load_is_divided_among_active_pods_by_their_allocation() {
    for (present, busy, load) in [
        (&["p"][..], Some(60), Some(600_000)),
        (&["p", "q"], Some(60), Some(400_000)),
        (&["p", "q", "stranger"], Some(60), Some(400_000)),
        (&["q"], Some(60), Some(0)),
        (&["p", "q"], None, None),
        (&["q"], None, None), // MIG reports no load of any pod
    ] {
        let ledger = shared();
        let mut seen = uses("A", present);
        seen[0].busy_percent = busy;
        let known = |process: &mut ProcessUse| process.memory = Some(MemMib::new(1));
        seen[0].processes.as_mut().unwrap().iter_mut().for_each(known);
        (0..3).for_each(|at| note(&ledger, &seen, at));
        let usage = *ledger.details("n").usages.of(&uid("p")).unwrap();
        assert_eq!(usage.mean_load().map(Share::millionths), load, "{present:?} {busy:?}");
    }
}

#[test]
fn lists_are_weighted_by_the_time_they_cover() {
    let ledger = tenanted();
    for at in 0..10 {
        list(&ledger, Some(9), Some(80), at * 5); // 50 s
    }
    for at in 46..=55 {
        list(&ledger, Some(9), Some(20), at); // 10 s: another pod drains
    }
    list(&ledger, Some(9), Some(80), 1_000); // stands for the usual pause
    let usage = *ledger.details("n").usages.of(&uid("p")).unwrap();
    let mean = (50 * 800_000 + 10 * 200_000 + 5 * 800_000) / 65;
    assert_eq!(usage.mean_load().map(Share::millionths), Some(mean));
}

#[test]
fn a_pod_is_idle_only_while_lists_show_it() {
    let ledger = tenanted();
    let idle_for = |at| {
        let usage = *ledger.details("n").usages.of(&uid("p")).unwrap();
        usage.idle_for(seconds(at)).as_secs()
    };
    for at in (0..=600).step_by(5) {
        list(&ledger, None, Some(0), at);
    }
    assert_eq!(idle_for(600), 600);
    list(&ledger, None, Some(0), 630);
    assert_eq!(idle_for(630), 630, "six lists may be lost");
    list(&ledger, None, Some(0), 661);
    assert_eq!(idle_for(671), 10, "nobody knows what it did meanwhile");
    let mut seen = uses("A", &[]);
    seen[0].processes = Some(vec![ProcessUse { pod: Some(uid("p")), memory: None }]);
    note(&ledger, &seen, 700);
    assert_eq!(idle_for(700), 0, "what it does is not known");
}

fn used(mib: u64, load: Option<u64>) -> Option<Used> {
    Some(Used { memory: MemMib::new(mib), load: load.map(Share::from_millionths) })
}

/// Stretches of five minutes.
fn history(stretches: Vec<Option<Used>>) -> History {
    History { every: Duration::from_secs(300), stretches }
}

#[test]
fn history_and_current_samples_merge_into_one_sketch() {
    let ledger = tenanted();
    assert_eq!(ledger.pods_without_history(), [uid("p")]);
    let past = vec![None, used(400, Some(500_000)), used(100, Some(0)), used(100, Some(0))];
    assert!(ledger.recall_use(&uid("p"), &history(past.clone())));
    assert_eq!(ledger.pods_without_history(), []);
    for at in 0..60 {
        list(&ledger, Some(200), Some(0), at * 5);
    }
    let usage = *ledger.details("n").usages.of(&uid("p")).unwrap();
    assert_eq!(usage.peak, MemMib::new(400), "the highest of both");
    let now = seconds(300);
    assert_eq!(usage.watched_for(now), Duration::from_secs(600 + 300), "from the earliest on");
    assert_eq!(usage.idle_for(now), Duration::from_secs(600 + 300), "two stretches and since");
    assert_eq!(usage.percentile(50), Share::from_millionths(250_000), "120 of 240 at 100 of 500");
    assert_eq!(usage.percentile(75), Share::from_millionths(437_500), "then 60 at 200");
    assert_eq!(usage.mean_load(), Some(Share::from_millionths(125_000)), "one stretch of four");
    let advice = ledger.advice(now).remove(0);
    assert!(advice.is_idle(), "known immediately: {advice:?}");
    list(&ledger, Some(200), Some(3), 305);
    ledger.recall_use(&uid("p"), &history(vec![used(499, None); 9]));
    let usage = *ledger.details("n").usages.of(&uid("p")).unwrap();
    assert_eq!(usage.peak, MemMib::new(400), "history counts once");
    assert_eq!(usage.idle_for(seconds(306)), Duration::from_secs(1), "the latest of both");
}

#[test]
fn an_unmeasured_pod_is_not_idle() {
    let idle = used(9, Some(0));
    for (stretches, watched, idle_for) in [
        (vec![idle; 4], 900, 900),
        (vec![None, idle, None, idle, idle], 900, 600),
        (vec![idle, idle, None], 600, 0),
        (vec![idle, used(9, None)], 300, 0), // MIG reports no load
        (vec![used(9, Some(1)), used(0, None)], 300, 300), // no process, so no load
        (vec![idle], 0, 0),
    ] {
        let ledger = tenanted();
        assert!(ledger.recall_use(&uid("p"), &history(stretches.clone())));
        let usage = *ledger.details("n").usages.of(&uid("p")).unwrap();
        let at = Timestamp::START;
        let found = (usage.watched_for(at).as_secs(), usage.idle_for(at).as_secs());
        assert_eq!(found, (watched, idle_for), "{stretches:?}");
    }
}

#[test]
fn empty_or_unknown_history_changes_nothing() {
    let ledger = tenanted();
    assert!(ledger.recall_use(&uid("p"), &history(vec![None; 9])));
    assert!(ledger.details("n").usages.of(&uid("p")).is_none());
    assert!(!ledger.recall_use(&uid("stranger"), &history(vec![used(1, None)])));
}

#[test]
fn absurd_amounts_cause_no_error() {
    let mut usage = Usage::new(Timestamp::START);
    let all = Used { memory: MemMib::new(u64::MAX), load: Some(Share::from_millionths(u64::MAX)) };
    usage.note(&all, MemMib::ZERO, u32::MAX, Duration::MAX);
    usage.note(&all, MemMib::ZERO, u32::MAX, Duration::MAX);
    assert_eq!(usage.percentile(100).millionths(), 1_062_500, "beyond all");
    assert!(usage.enough() >= MemMib::new(u64::MAX - 255) && usage.mean_load().is_some());
    assert_eq!(Usage::new(Timestamp::START).enough(), MemMib::new(256));
    let long = History { every: Duration::MAX, stretches: vec![Some(all); 3] };
    usage.recall(&long, MemMib::ZERO);
    assert_eq!(usage.watched_for(seconds(1)), Duration::MAX);
}

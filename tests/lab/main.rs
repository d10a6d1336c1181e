//! `gpupack-lab` as its users run it: the real binary on the small trace of the repository.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use expect_test::{Expect, expect};
use serde_json::Value;

const NODES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/small-nodes.csv");
const PODS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/small-pods.csv");

fn call(flags: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack-lab"));
    command.args(flags.split_whitespace());
    command
}

/// Standard output of a call that must succeed and complain about nothing.
fn printed_by(mut command: Command) -> String {
    let output = command.output().expect("the program starts");
    let complaint = text(output.stderr);
    assert_eq!((output.status.code(), complaint.as_str()), (Some(0), ""), "{command:?}");
    text(output.stdout)
}

/// The same with the small trace.
fn printed(flags: &str) -> String {
    printed_by(call(&format!("{flags} --nodes {NODES} --pods {PODS}")))
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("the program writes UTF-8")
}

fn check_refusal(output: &Output, code: i32, expected: &Expect) {
    expected.assert_eq(&text(output.stderr.clone()));
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]));
}

#[test]
fn policies_of_the_lab_give_the_figures_they_gave_before() {
    let expected = expect![[r#"
        policy,seed,at_100,last,arrivals,lost,lost_before_90,fragmentation_at_100,fragmentation_at_end,packing_efficiency
        dotprod,42,89.3,94.5,237,47,14,70.7064,98.3645,95.1608
        dotprod,43,86.12,93.75,257,71,23,66.7736,98.9087,95.0704
        gpupacking,42,90.13,95.62,237,45,12,63.1634,97.4269,95.625
        gpupacking,43,88.85,95.99,257,68,18,62.5483,98.3572,95.993
        gpuclustering,42,90.69,91.51,237,54,12,98.0752,99.0317,93.4609
        gpuclustering,43,86.81,92.74,257,75,22,72.6371,99.4938,95.3928
        random,42,81.24,87.69,237,36,10,80.1517,94.1255,88.3076
        random,43,82.19,88.4,257,58,12,79.0661,91.6283,89.0139
    "#]];
    let policies = "dotprod,gpupacking,gpuclustering,random";
    expected
        .assert_eq(&printed(&format!("replay --policy {policies} --seeds 42..43 --output csv")));
    let expected = expect![[r#"
        policy,seed,class,arrivals,allocation,blocked_demand,blocked_pods,waiting_demand,still_waiting,wait_p50,wait_p90,wait_p99,wait_max
        random,1,all,528,66.8375,30.9338,8.1439,0,0,0,0,0,0
        random,1,cpu_only,44,0,0,0,0,0,0,0,0,0
        random,1,fraction,358,41.0358,6.9384,5.5866,0,0,0,0,0,0
        random,1,whole,95,20.8419,3.1579,3.1579,0,0,0,0,0,0
        random,1,several,31,4.9597,82.6087,64.5161,0,0,0,0,0,0
        random,2,all,508,66.0927,28.4899,7.874,0,0,0,0,0,0
        random,2,cpu_only,46,0,0,0,0,0,0,0,0,0
        random,2,fraction,350,36.3707,6.415,5.1429,0,0,0,0,0,0
        random,2,whole,80,19.5022,6.25,6.25,0,0,0,0,0,0
        random,2,several,32,10.2197,75.8065,53.125,0,0,0,0,0,0
    "#]];
    expected.assert_eq(&printed("replay --policy random --churn 0.9 --seeds 1..2 --output csv"));
}

#[test]
fn variants_of_the_policy_differ_from_it() {
    let csv = printed("replay --policy fragmentation,known-mix,without-host --output csv");
    let rows: Vec<&str> =
        csv.lines().skip(1).filter_map(|line| line.split_once(',')).map(|(_, row)| row).collect();
    assert_eq!(rows.len(), 3);
    assert!(rows[0] != rows[1] && rows[0] != rows[2], "{csv}");
}

#[test]
fn stress_worlds_are_compared_with_the_best_baseline() {
    let flags = "stress --world ten-fractions,fleet-4 --world filled-8 --seeds 1..2";
    let table = printed(flags);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "24 nodes, 144 GPUs; 200 pods, stress worlds, seeds 1..2");
    let heads = "world of fragmentation fgd bestfit binpack known-mix least worst at against early";
    assert_eq!(lines[2].split_whitespace().collect::<Vec<_>>()[..12].join(" "), heads);
    let names = lines[3..6].iter().map(|line| line.split_whitespace().next().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), ["fleet-4", "filled-8", "ten-fractions"]);
    let json = printed(&format!("{flags} --output json --jobs 1"));
    assert_eq!(json, printed(&format!("{flags} --output json --jobs 3")));
    let json: Value = serde_json::from_str(&json).unwrap();
    for world in json["worlds"].as_array().unwrap() {
        let curve = |at: usize| world["results"][at]["curve"].as_object().unwrap();
        let least = curve(0).iter().map(|(load, ours)| {
            let theirs = (1..4).map(|at| curve(at)[load].as_f64().unwrap());
            ours.as_f64().unwrap() - theirs.fold(0.0, f64::max)
        });
        let least = least.fold(f64::INFINITY, f64::min);
        assert!((world["worst"]["difference"].as_f64().unwrap() - least).abs() < 1e-3, "{world}");
    }
    let folder = tempfile::tempdir().unwrap();
    let charts = format!("--charts {}", folder.path().display());
    let csv = printed(&format!("{flags} --policy fgd --output csv {charts}"));
    let picture =
        fs::read_to_string(folder.path().join("ten-fractions-fragmentation.svg")).unwrap();
    assert!(picture.contains("Packing efficiency") && picture.contains(">\nfgd\n<"), "{picture}");
    assert!(csv.contains("\nfleet-4,allocation,fgd,2,100,"), "{csv}");
    check_refusal(
        &call(&format!("stress --nodes {NODES} --pods {PODS} --world flat")).output().unwrap(),
        1,
        &expect![[r#"
        gpupack-lab: --world: there is no world `flat`; choose from shares-several, several-shares, small-large, large-small, shares-several-shares, several-shares-several, small-large-small, all-several-all, shares-several-twice, shares-several-slowly, several-shares-slowly, shares-several-shares-slowly, small-large-small-slowly, shares-several-twice-slowly, order-rising, order-falling, order-runs, sizes-80, sizes-115, sizes-quarters, cpu-85, fleet-4, fleet-8, fleet-12, fleet-30, fleet-100, filled-8, filled-20, filled-20-memory, filled-100, filled-300, ten-fractions
    "#]],
    );
}

#[test]
fn worlds_with_times_are_compared_with_the_best_baseline() {
    let flags = "times --kind lifesize,services --load 0.8 --fleet 3 --seeds 1..2";
    let table = printed(flags);
    let lines: Vec<&str> = table.lines().collect();
    let title = "24 nodes, 144 GPUs; 200 pods, on 3 nodes, blocked pods lost, seeds 1..2";
    assert_eq!(lines[0], title);
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(lines[3]), "kind seen load fragmentation fgd bestfit binpack wins ratio");
    assert!(words(lines[4]).starts_with("lifesize yes 0.8 "), "{table}");
    assert!(words(lines[5]).starts_with("services no 0.8 "), "{table}");

    let folder = tempfile::tempdir().unwrap();
    printed(&format!("{flags} --charts {}", folder.path().display()));
    let read = |file| fs::read_to_string(folder.path().join(file)).unwrap();
    let blocked = read("times-blocked.svg");
    for text in ["lifesize 0.8", "services * 0.8", "binpack"] {
        assert!(blocked.contains(text), "{text}");
    }
    assert!(read("lifesize-0.8-room.svg").contains("Room for the largest pods"));

    let queue = format!("{flags} --queue --standing-hold-after 3600");
    let json = printed(&format!("{queue} --output json --jobs 1"));
    assert_eq!(json, printed(&format!("{queue} --output json --jobs 3")));
    let json: Value = serde_json::from_str(&json).unwrap();
    let number = |value: &Value| value.as_f64().unwrap();
    let csv = printed(&format!("{queue} --output csv"));
    for (world, kinds) in json["worlds"].as_array().unwrap().iter().zip(["seen", "unseen"]) {
        let results = world["results"].as_array().unwrap();
        let of =
            |policy: usize, seed: usize| number(&results[policy]["runs"][seed]["waiting_gpus"]);
        let least = |seed| (1..4).map(|policy| of(policy, seed)).fold(f64::INFINITY, f64::min);
        let best: f64 = (0..2).map(least).sum();
        let summary = json["summary"].as_array().unwrap().iter();
        let mut of_kinds = summary.filter(|row| row["kinds"] == kinds);
        let waiting = of_kinds.find(|row| row["measure"] == "waiting_gpus").unwrap();
        assert_eq!(waiting["runs"], 2);
        let ratio = (of(0, 0) + of(0, 1)) / best;
        assert!(best > 0.0 && (number(&waiting["ratio"]) - ratio).abs() < 1e-3, "{world}");
        for (place, policy) in ["fragmentation", "fgd", "bestfit", "binpack"].iter().enumerate() {
            let (kind, is_seen) = (world["kind"].as_str().unwrap(), &world["is_seen"]);
            let row = format!("{kind},{is_seen},0.8,{policy},2,{},", of(place, 1));
            assert!(csv.contains(&row), "{row} in {csv}");
        }
    }
}

const BURST_NODES: &str =
    "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib\nn,8000,65536,2,H100,81000\n";

const BURST_PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,limit_milli,creation_time,\
    deletion_time,burst_gap_seconds,burst_seconds,burst_memory_milli\n\
    nb-1,1000,4096,1,500,1000,0,18000,600,120,750\n\
    nb-2,1000,4096,1,500,1000,0,18000,600,120,750\n\
    train,4000,16384,1,1000,,9000,12600,,,\n\
    last,1000,1024,0,0,,18000,18001,,,\n";

/// `gpupack-lab bursts` on a node with two GPUs and these pods.
fn bursts(folder: &Path, pods: &str, flags: &str) -> Output {
    for (name, text) in [("nodes.csv", BURST_NODES), ("pods.csv", pods)] {
        fs::write(folder.join(name), text).expect("a file can be written");
    }
    let mut command = call(&format!("bursts --nodes nodes.csv {flags}"));
    command.current_dir(folder).output().expect("the program starts")
}

#[test]
fn bursts_of_a_trace_are_played_under_each_rule() {
    let folder = tempfile::tempdir().unwrap();
    let play = |flags: &str| {
        let output = bursts(folder.path(), BURST_PODS, flags);
        let errors = text(output.stderr);
        assert_eq!(output.status.code(), Some(0), "{errors}");
        text(output.stdout)
    };
    let table = play("--pods pods.csv");
    let first = table.lines().next().unwrap();
    assert_eq!(first, "bursts of 2 of 4 pods on 2 GPUs of 1 nodes, 5.0 hours, 1 seeds");
    assert_eq!(table, play("--pods pods.csv"), "the same bytes for the same input");
    let json: Value =
        serde_json::from_str(&play("--pods pods.csv --seeds 1..2 --output json")).unwrap();
    assert_eq!((&json["trace"], &json["seeds"]), (&"pods".into(), &2.into()));
    let rules = json["rules"].as_array().unwrap();
    let of = |rule: &str, name: &str| {
        let row = rules.iter().find(|row| row["borrow"] == rule).unwrap();
        row[name].as_f64().unwrap()
    };
    assert_eq!(of("none", "refused_percent"), 100.0, "all want more than their request");
    let refused = of("memory", "refused_percent");
    assert!((40.0..70.0).contains(&refused), "until one of them is moved home: {json}");
    assert_eq!((of("none", "recalls"), of("memory", "recalls")), (0.0, 10.0));
    assert!((59.9..60.1).contains(&of("none", "allocated_percent")), "{json}");
    let busy: Value =
        serde_json::from_str(&play("0.9 --pods pods.csv --seeds 1..2 --output json")).unwrap();
    let allocated = busy["rules"][0]["allocated_percent"].as_f64().unwrap();
    assert!((89.9..90.1).contains(&allocated), "{busy}");
}

#[test]
fn faults_of_traces_with_bursts_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let no_bursts = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,1,500\n";
    let untimed = BURST_PODS.replace(",9000,12600", ",,12600");
    let unlimited = BURST_PODS.replacen("500,1000,0", "500,,0", 1);
    for (pods, flags, code, part) in [
        (no_bursts, "", 1, "no pod of --pods has `burst_gap_seconds`"),
        (&untimed, "", 1, "pod `train` has no `creation_time`"),
        (
            &unlimited,
            "",
            1,
            "--pods: `pods.csv`: bursts of the pod `nb-1`: they need a limit of the pod",
        ),
        (BURST_PODS, "1.5", 2, "it must be a number from 0.05 to 0.95"),
        (BURST_PODS, "--pods other.csv", 2, "cannot be used multiple times"),
    ] {
        let output = bursts(folder.path(), pods, &format!("--pods pods.csv {flags}"));
        let errors = text(output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags}: {errors}");
        assert!(errors.contains(part), "{flags}: {errors}");
    }
    assert_eq!(call("bursts").output().unwrap().status.code(), Some(2), "neither load nor trace");
}

#[test]
fn bounds_are_above_the_results_of_all_policies() {
    let json = |flags: &str| -> Value {
        serde_json::from_str(&printed(flags)).expect("the program writes JSON")
    };
    let bounds = json("bound --seeds 42..43 --output json");
    let report = json("replay --policy fgd,bestfit --seeds 42..43 --output json");
    let figure = |value: &Value| value.as_f64().expect("a number");
    for place in ["at_100", "last"] {
        for (at, seed) in [42, 43].into_iter().enumerate() {
            let bound = &bounds[at];
            assert_eq!((&bound["trace"], &bound["seed"]), (&"small-pods".into(), &seed.into()));
            let any = figure(&bound[format!("any_{place}")]);
            let faithful = figure(&bound[format!("faithful_{place}")]);
            let reached = |policy: usize| figure(&report["results"][policy]["runs"][at][place]);
            assert_eq!(report["results"][0]["policy"], "fgd");
            assert!(reached(0) <= any && reached(1) <= any, "{report} above {bound}");
            assert!(reached(0) <= faithful && faithful <= any, "{report} above {bound}");
        }
    }
    let table = printed("bound");
    assert!(table.contains("\n any policy ") && table.contains("\n faithful "), "{table}");
    assert_eq!(printed("bound --seeds 1..3 --output csv").lines().count(), 4);
    let folder = tempfile::tempdir().unwrap();
    let pods = folder.path().join("pods.csv");
    fs::write(&pods, "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib\nm,1,1,1,,9\n")
        .unwrap();
    let output =
        call(&format!("bound --as-is --nodes {NODES} --pods {}", pods.display())).output().unwrap();
    check_refusal(
        &output,
        1,
        &expect![[r#"
            gpupack-lab: the bounds know whole GPUs and shares of one GPU only: `m` has more in its optional columns
        "#]],
    );
}

#[test]
fn mig_instances_on_demand_give_the_figures_they_gave_before() {
    let churn = "mig bimodal,models-80-20 --gpus 10 --churn 0.9 --one-move --bound --seed 7";
    expect![[r#"
        mix,seed,policy,blocked_percent,moves_percent
        "bimodal",7,"lower bound",7.18,
        "bimodal",7,"free repacking",19.7959,
        "bimodal",7,"gpupack",30.7483,0.0
        "bimodal",7,"gpupack, one move",25.3061,4.2821
        "bimodal",7,"fgd",31.2925,0.0
        "bimodal",7,"hami",30.7483,0.0
        "bimodal",7,"mfi",31.8367,0.0
        "bimodal",7,"first-fit",31.1565,0.0
        "models-80-20",7,"lower bound",3.9763,
        "models-80-20",7,"free repacking",13.7884,
        "models-80-20",7,"gpupack",19.2491,0.0
        "models-80-20",7,"gpupack, one move",15.5631,5.2752
        "models-80-20",7,"fgd",18.9078,0.0
        "models-80-20",7,"hami",21.0239,0.0
        "models-80-20",7,"mfi",20.8191,0.0
        "models-80-20",7,"first-fit",25.3242,0.0
    "#]]
    .assert_eq(&printed_by(call(&format!("{churn} --output csv"))));
    let arrivals = "mig small --gpus 10 --bound --seeds 7..8";
    expect![[r#"
        mix,seed,policy,allocated_percent,first_loss_percent
        "small",7,"bound",78.75,
        "small",7,"gpupack",78.75,98.75
        "small",7,"fgd",78.75,83.75
        "small",7,"hami",78.75,101.25
        "small",7,"mfi",78.75,91.25
        "small",7,"first-fit",78.75,96.25
        "small",8,"bound",95.0,
        "small",8,"gpupack",95.0,107.5
        "small",8,"fgd",95.0,107.5
        "small",8,"hami",95.0,107.5
        "small",8,"mfi",92.5,95.0
        "small",8,"first-fit",92.5,95.0
    "#]]
    .assert_eq(&printed_by(call(&format!("{arrivals} --output csv"))));
    let json: Value =
        serde_json::from_str(&printed_by(call(&format!("{churn} --output json")))).unwrap();
    assert_eq!((&json["gpus"], &json["load"]), (&Value::from(10), &Value::from(0.9)));
    let table = printed_by(call(churn));
    assert!(table.starts_with("MIG instances on 10 GPUs, churn at load 0.9, "), "{table}");
    assert!(table.contains("\ngpupack, one move "), "{table}");
    assert!(!printed_by(call("mig odd --gpus 1")).contains("one move"), "only where it is wanted");
    for (flags, part) in [
        ("mig huge", "no such mix: expected all, uniform, small"),
        ("mig odd --churn 3", "it must be a number from 0.05 to 2"),
    ] {
        let output = call(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(output.stderr).contains(part), "{flags}");
    }
}

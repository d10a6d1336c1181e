//! `gpupack simulate` as its users run it: the real binary on the small trace of the repository.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use expect_test::{Expect, expect};
use serde_json::Value;

const NODES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/small-nodes.csv");
const PODS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/small-pods.csv");
const POLICIES: &str = "fragmentation,binpack,spread,fgd,bestfit";

fn command(nodes: &str, pods: &str, flags: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpupack"));
    command.arg("simulate");
    command.args(["--nodes", nodes, "--pods", pods]).args(flags.split_whitespace());
    command
}

fn simulate(flags: &str) -> Output {
    command(NODES, PODS, flags).output().expect("the program starts")
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("the program writes UTF-8")
}

/// Standard output of a call that must succeed and complain about nothing.
fn printed(flags: &str) -> String {
    let output = simulate(flags);
    let complaint = text(output.stderr);
    assert_eq!((output.status.code(), complaint.as_str()), (Some(0), ""), "{flags}");
    text(output.stdout)
}

fn check_refusal(output: &Output, code: i32, expected: &Expect) {
    expected.assert_eq(&text(output.stderr.clone()));
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]));
}

/// The error of a call with these two files, both written again.
fn check_files(nodes: &str, pods: &str, expected: &Expect) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).expect("a file can be written");
        path.display().to_string()
    };
    let (nodes, pods) = (file("nodes.csv", nodes), file("pods.csv", pods));
    let mut output = command(&nodes, &pods, "--as-is").output().expect("the program starts");
    let folder = format!("{}/", folder.path().display());
    output.stderr = text(output.stderr).replace(&folder, "").into_bytes();
    check_refusal(&output, 2, expected);
}

#[test]
fn every_policy_gives_the_figures_it_gave_before() {
    let expected = expect![[r#"
        policy,seed,at_100,last,arrivals,lost,lost_before_90,fragmentation_at_100,fragmentation_at_end,packing_efficiency
        fragmentation,42,93.72,95.92,237,40,3,90.7502,96.0499,95.9166
        fragmentation,43,94.22,96,257,63,5,94.1169,97.6562,96
        binpack,42,90.69,96.33,237,43,12,65.1924,97.6634,96.3333
        binpack,43,88.81,95.93,257,67,17,63.4646,98.7398,96.6013
        spread,42,71.69,75.8,237,46,13,82.1264,90.5219,75.7986
        spread,43,72.7,80.41,257,63,17,80.5887,92.5901,80.4097
        fgd,42,92.8,94.23,237,43,1,95.2271,97.6059,94.8881
        fgd,43,90.6,93.46,257,58,3,88.316,98.816,95.4468
        bestfit,42,88.99,92.82,237,52,16,81.3708,98.0372,94.1267
        bestfit,43,85.82,93.53,257,73,25,65.2293,99.259,95.5177
    "#]];
    expected.assert_eq(&printed(&format!("--policy {POLICIES} --seeds 42..43 --output csv")));
}

#[test]
fn files_are_kept_as_they_are_on_request() {
    let expected = expect![[r#"
        policy,seed,at_100,last,arrivals,lost,lost_before_90,fragmentation_at_100,fragmentation_at_end,packing_efficiency
        fgd,42,93.0267,94.15,200,22,5,92.6521,93.7079,94.8111
        bestfit,42,88.4367,92.78,200,23,17,72.2504,93.6771,93.4265
    "#]];
    expected.assert_eq(&printed("--as-is --policy fgd --policy bestfit --output csv"));
}

#[test]
fn the_table_is_aligned_and_has_titles() {
    let table = printed("--policy fgd,bestfit --seeds 42..44 --load 1.1");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "24 nodes, 144 GPUs; 200 pods, load 1.1, seeds 42..44");
    assert!(lines[2].starts_with(" policy") && lines[2].ends_with("seconds"), "{table}");
    assert!(lines[3].starts_with(" fgd ") && lines[4].starts_with(" bestfit "), "{table}");
    // Our own spread, and of the second policy that of the difference seed by seed.
    assert_eq!(lines[3..5].iter().map(|line| line.matches('±').count()).sum::<usize>(), 6);
    assert_eq!(lines[4].matches("/3").count(), 2, "{table}");
    let widths: Vec<usize> = lines[2..5].iter().map(|line| line.chars().count()).collect();
    assert!(widths.iter().all(|width| *width == widths[0] && *width <= 120), "{table}");
}

#[test]
fn json_has_means_and_every_run_in_the_requested_order() {
    let json: Value =
        serde_json::from_str(&printed("--policy spread,fgd --seeds 42..43 --output json")).unwrap();
    let results = json["results"].as_array().unwrap();
    let names: Vec<&str> = results.iter().map(|one| one["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["spread", "fgd"]);
    for result in results {
        assert_eq!(result["seeds"], serde_json::json!([42, 43]));
        for figure in ["at_100", "last", "lost", "lost_before_90", "fragmentation_at_100"] {
            let of = |run: usize| result["runs"][run][figure].as_f64().unwrap();
            let mean = result[figure].as_f64().unwrap();
            assert!((mean - (of(0) + of(1)) / 2.0).abs() < 1e-4, "{figure} of {result}");
        }
    }
    let half: Value =
        serde_json::from_str(&printed("--policy fgd --load 0.5 --output json")).unwrap();
    assert_eq!(half["results"][0]["policy"], "fgd");
    assert_eq!(half["results"][0]["at_100"], Value::Null);
    assert_eq!(half["results"][0]["runs"][0]["lost"], 0);
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    for mode in ["", "--churn 0.4", "--timeline --load 0.8 --queue"] {
        let flags = format!("--policy fragmentation,spread --seeds -1..0 --output json {mode}");
        assert_eq!(printed(&format!("{flags} --jobs 1")), printed(&format!("{flags} --jobs 3")));
    }
}

#[test]
fn the_charts_are_svgs_with_a_curve_per_policy() {
    let folder = tempfile::tempdir().unwrap();
    let charts = format!("--charts {}", folder.path().display());
    let drawn = |flags: &str| {
        printed(&format!("{charts} {flags}"));
        let paths = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
        let pictures = paths.filter(|path| path.extension().is_some_and(|it| it == "svg"));
        pictures.map(|path| fs::read_to_string(path).unwrap()).collect::<String>()
    };
    let picture = drawn("--seeds 42..43");
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
    for (text, times) in [
        ("GPU allocation near full load", 1),
        ("Fragmentation: free room that typical pods cannot use", 1),
        ("Packing efficiency: fullness of occupied GPUs", 1),
        ("Stranded GPU room at 100 % load", 1),
        ("fragmentation\n", 5),
        ("bestfit\n", 5),
    ] {
        assert_eq!(picture.matches(text).count(), times, "{text}");
    }
    // Below 85 % there is nothing to show larger; with next to no load no pod arrives at all.
    assert!(!drawn("--load 0.5").contains("near full load"));
    drawn("--load 0.00001");
}

#[test]
fn churn_gives_the_figures_it_gave_before() {
    let expected = expect![[r#"
        policy,seed,class,arrivals,allocation,blocked_demand,blocked_pods,waiting_demand,still_waiting,wait_p50,wait_p90,wait_p99,wait_max
        fgd,1,all,528,79.9848,24.8346,5.1136,0,0,0,0,0,0
        fgd,1,cpu_only,44,0,0,0,0,0,0,0,0,0
        fgd,1,fraction,358,40.6145,3.9312,2.7933,0,0,0,0,0,0
        fgd,1,whole,95,21.0109,1.0526,1.0526,0,0,0,0,0,0
        fgd,1,several,31,18.3593,69.5652,51.6129,0,0,0,0,0,0
        fgd,2,all,508,74.4153,19.9568,5.9055,0,0,0,0,0,0
        fgd,2,cpu_only,46,0,0,0,0,0,0,0,0,0
        fgd,2,fraction,350,37.2768,4.6817,4.2857,0,0,0,0,0,0
        fgd,2,whole,80,19.4981,6.25,6.25,0,0,0,0,0,0
        fgd,2,several,32,17.6403,51.6129,31.25,0,0,0,0,0,0
    "#]];
    expected.assert_eq(&printed("--policy fgd --churn 0.9 --seeds 1..2 --output csv"));
}

#[test]
fn own_times_with_a_queue_give_the_figures_they_gave_before() {
    let expected = expect![[r#"
        policy,seed,class,arrivals,allocation,blocked_demand,blocked_pods,waiting_demand,still_waiting,wait_p50,wait_p90,wait_p99,wait_max
        fgd,42,all,200,84.2903,31.1476,15.5,7.5223,8,0,10704.025,102234.964,123931.35
        fgd,42,cpu_only,16,0,0,0,0,0,0,0,0,0
        fgd,42,fraction,136,41.9475,18.966,14.7059,2.8479,4,0,10704.025,103895.233,123931.35
        fgd,42,whole,38,21.1135,15.7895,15.7895,0.4957,0,0,7060.989,76634.222,76634.222
        fgd,42,several,10,21.2292,63.6364,50,4.1786,4,0,42613.87,82513.885,82513.885
        bestfit,42,all,200,81.883,29.8996,18,12.0861,10,0,17281.377,98851.326,152298.743
        bestfit,42,cpu_only,16,0,0,0,0,0,0,0,0,0
        bestfit,42,fraction,136,41.5398,20.5645,16.9118,3.5897,6,0,21055.576,123931.35,152298.743
        bestfit,42,whole,38,20.789,18.4211,18.4211,1.0134,0,0,9631.816,56199.274,56199.274
        bestfit,42,several,10,19.5541,54.5455,60,7.4828,4,16433.921,37936.553,82513.885,82513.885
    "#]];
    expected.assert_eq(&printed("--policy fgd,bestfit --timeline --load 0.9 --queue --output csv"));
}

#[test]
fn placements_of_pods_are_printed_as_json() {
    let flags = "--policy fgd,bestfit --churn 0.9 --queue --seeds 1..2 --output json";
    let json: Value = serde_json::from_str(&printed(flags)).unwrap();
    let [fgd, bestfit] = json["results"].as_array().unwrap().as_slice() else { panic!("{json}") };
    assert_eq!((&fgd["time_unit"], &fgd["runs"][1]["seed"]), (&"mean lifetimes".into(), &2.into()));
    assert_eq!(fgd["to_fgd"]["waiting_demand"], Value::Null);
    let off = &bestfit["to_fgd"]["waiting_demand"];
    let waiting = |of: &Value| of["waiting_demand"].as_f64().unwrap();
    assert!((off["mean"].as_f64().unwrap() - (waiting(bestfit) - waiting(fgd))).abs() < 1e-3);
    assert_eq!(off["seeds"], 2);
    let by_class: f64 = fgd["classes"].as_array().unwrap().iter().map(waiting).sum();
    assert!((by_class - waiting(fgd)).abs() < 1e-3, "{fgd}");
    assert_eq!(fgd["over_time"].as_array().unwrap().len(), 81);
    assert_eq!(fgd["over_time"][80]["at"], 4.0);
    assert!(fgd["wait_max"].as_f64() >= fgd["wait_p99"].as_f64());
}

/// A cluster and pods in all dimensions.
const MORE_NODES: &str = "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,mig,slots,enforcement\n\
    a,64000,262144,2,NVIDIA A100-SXM4-40GB,40379,3g.20gb 1g.5gb|,,mps\n\
    l,64000,262144,1,NVIDIA L4,22558,,4,\n";
const MORE_PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,gpu_memory_mib,mig_profile,\
    gpu_slots,isolation,limit_milli,priority,node,devices,placed_isolation\n\
    runs,1000,1024,1,100,,,,,,500,,a,1:4037:100,mps\n\
    guarded,1000,1024,1,,,16384,,,memory,,,,,\n\
    slot,1000,1024,1,,,,,1,,,5,,,\n\
    instance,1000,1024,1,,,,1g.5gb,,,,,,,\n\
    hard,1000,1024,1,,,10000,,,hardware,,,,,\n\
    large,1000,1024,1,333.33,,40000,,,,,,,,\n\
    share,1000,1024,1,125.5,L4,,,,,,,,,\n";

/// `gpupack simulate --as-is` on these files in a folder.
fn as_is(folder: &Path, nodes: &str, pods: &str, flags: &str) -> Output {
    for (name, text) in [("nodes.csv", nodes), ("pods.csv", pods), ("other.csv", pods)] {
        fs::write(folder.join(name), text).expect("a file can be written");
    }
    let mut command = command("nodes.csv", "pods.csv", &format!("--as-is {flags}"));
    command.current_dir(folder).output().expect("the program starts")
}

#[test]
fn requests_in_all_dimensions_are_placed_and_the_end_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let files = "--keep-placements --write-pods end.csv --write-free free.csv --output csv";
    let flags = format!("--policy binpack {files}");
    let output = as_is(folder.path(), MORE_NODES, MORE_PODS, &flags);
    assert_eq!((output.status.code(), text(output.stderr)), (Some(0), String::new()));
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    let expected = expect![[r#"
        name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,gpu_memory_mib,mig_profile,gpu_slots,isolation,limit_milli,priority,node,devices,placed_isolation
        runs,1000,1024,1,100,,,,,,,,500,,a,1:4037:100,mps
        guarded,1000,1024,1,0,,,,16384,,,memory,,,a,1:16384:405.755,mps
        slot,1000,1024,1,0,,,,,,1,,,5,l,0:5639:250,
        instance,1000,1024,1,0,,,,,1g.5gb,,,,,a,0.1:4864:1000,hardware
        hard,1000,1024,1,0,,,,10000,,,hardware,,,a,0.0:19968:1000,hardware
        large,1000,1024,1,333.33,,,,40000,,,,,,,,
        share,1000,1024,1,125.5,L4,,,,,,,,,l,0:5639:250,
    "#]];
    expected.assert_eq(&read("end.csv"));
    let expected = expect![[r#"
        node,device,model,free_memory_mib,free_milli
        a,0.0,NVIDIA A100-SXM4-40GB,0,0
        a,0.1,NVIDIA A100-SXM4-40GB,0,0
        a,1,NVIDIA A100-SXM4-40GB,19958,494.245
        l,0,NVIDIA L4,11280,500
    "#]];
    expected.assert_eq(&read("free.csv"));
    // What was placed can stay, and then the same is free.
    let (placed, free) = (read("end.csv"), read("free.csv"));
    let output = as_is(folder.path(), MORE_NODES, &placed, &flags);
    assert_eq!((output.status.code(), read("free.csv")), (Some(0), free));
}

#[test]
fn faults_of_placements_and_of_ends_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let check = |pods: &str, flags: &str, expected: &Expect| {
        let output = as_is(folder.path(), MORE_NODES, pods, flags);
        check_refusal(&output, 2, expected);
    };
    let elsewhere = MORE_PODS.replace("a,1:4037:100", "a,1.0:4037:100");
    check(
        &elsewhere,
        "--keep-placements",
        &expect![[r#"
        gpupack: --keep-placements: pod `runs`, column `devices`: node `a` has no device `1.0`
    "#]],
    );
    check(
        MORE_PODS,
        "--pods other.csv --write-free f.csv",
        &expect![[r#"
            gpupack: --write-pods and --write-free write the end of one trace: give --pods once
        "#]],
    );
    check(
        &MORE_PODS.replace(",5,,,\n", ",high,,,\n"),
        "",
        &expect![[r#"
        gpupack: --pods: `pods.csv` line 4, column `priority`: `high` is not allowed, expected a whole number of 32 bits
    "#]],
    );
    let output = simulate("--keep-placements");
    assert!(text(output.stderr).contains("--as-is"), "it needs the files as they are");
}

#[test]
fn pods_without_a_suitable_node_are_counted_and_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pods.csv");
    fs::write(&path, fs::read_to_string(PODS).unwrap().replace(",T4,", ",T5,")).unwrap();
    let run = |flags: &str| {
        let pods = path.display().to_string();
        text(command(NODES, &pods, &format!("--as-is {flags}")).output().unwrap().stdout)
    };
    let reported = run("").lines().nth(1).unwrap().to_owned();
    assert_eq!(reported, "pods: 29 of 200 pods accept only GPU models that no node has");
    let json: Value = serde_json::from_str(&run("--output json")).unwrap();
    assert_eq!(json["unknown_model_pods"], 29);
}

#[test]
fn several_traces_are_compared_in_one_table_and_named_in_json() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        let path = folder.path().join(name);
        fs::copy(PODS, &path).unwrap();
        path.display().to_string()
    };
    let (first, second) = (copy("list_a.csv"), copy("list_b.csv"));
    let run = |flags: &str| {
        let flags = format!("--pods {second} --policy fgd,bestfit --as-is {flags}");
        let output = command(NODES, &first, &flags).output().unwrap();
        assert_eq!((output.status.code(), text(output.stderr)), (Some(0), String::new()));
        text(output.stdout)
    };
    let table = run("");
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "24 nodes, 144 GPUs; 2 traces, as is, seed 42");
    assert!(lines[3].starts_with(" a      fgd ") && lines[6].starts_with(" b      bestfit "));
    assert_eq!(table.matches("accept only GPU models that no node has").count(), 0);
    assert!(run("--output csv").contains("\na,fgd,42,93.0267,94.15,200,22,5,"));
    let json: Value = serde_json::from_str(&run("--output json")).unwrap();
    assert_eq!(json["traces"][1]["trace"], "b");
    assert_eq!(json["traces"][0]["results"], json["traces"][1]["results"]);
    assert_eq!(json["traces"][0]["results"][1]["at_100_to_fgd"]["wins"], 0);

    let flags = format!("--pods {first}");
    let output = command(NODES, &first, &flags).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(output.stderr).contains("list_a.csv` is given twice"));
}

#[test]
fn the_charts_of_each_trace_are_files_with_their_points_beside_them() {
    let folder = tempfile::tempdir().unwrap();
    let charts = folder.path().join("new");
    let timed = ["allocation", "fragmentation", "room", "stranded"];
    for (mode, panel, pictures) in [
        ("", "near full load", &["allocation", "fragmentation", "stranded"][..]),
        ("--churn 0.9 --queue", "Waiting pods", &timed),
    ] {
        printed(&format!("--policy fgd,bestfit {mode} --charts {}", charts.display()));
        let mut files: Vec<String> = fs::read_dir(&charts)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        let mut expected = vec!["charts.json".to_owned()];
        expected.extend(pictures.iter().map(|what| format!("small-pods-{what}.svg")));
        assert_eq!(files, expected);
        assert!(fs::read_to_string(charts.join(&files[1])).unwrap().contains(panel), "{mode}");
        let text = fs::read_to_string(charts.join("charts.json")).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let last = pictures.len() - 1;
        assert_eq!(json[last]["file"], files[last + 1].as_str());
        let stairs = json[last]["charts"][0]["curves"]["fgd"].as_array().unwrap();
        assert_eq!(stairs.last().unwrap(), &serde_json::json!([100.0, 100.0]));
    }
    let output = simulate(&format!("--charts {}", charts.join("charts.json").display()));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(output.stderr).contains("--charts: cannot create the folder"));
}

#[test]
fn bad_files_are_reported_with_position_and_valid_values() {
    let nodes = "sn,cpu_milli,memory_mib,gpu,model\nn,8000,8192,2,T4\n";
    let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1000,1024,1,500\n";
    check_files(
        nodes,
        &pods.replace("500", "1500"),
        &expect![[r#"
            gpupack: --pods: `pods.csv` line 2, column `gpu_milli`: `1500` is not allowed, expected thousandths above 0 up to 1000, with at most three decimals
        "#]],
    );
    check_files(
        &nodes.replace("model", "kind"),
        pods,
        &expect![[r#"
        gpupack: --nodes needs a CSV file with the columns sn, cpu_milli, memory_mib, gpu, model: `nodes.csv` has no column `model`
    "#]],
    );
    check_files(
        nodes,
        "",
        &expect![[r#"
            gpupack: --pods: `pods.csv` holds no rows
        "#]],
    );
    check_files(
        nodes,
        pods.lines().next().unwrap(),
        &expect![[r#"
            gpupack: --pods: `pods.csv` holds no rows
        "#]],
    );
    let output = command("absent.csv", PODS, "").output().unwrap();
    check_refusal(
        &output,
        2,
        &expect![[r#"
            gpupack: --nodes: cannot open `absent.csv`: No such file or directory (os error 2)
        "#]],
    );
}

#[test]
fn bad_flags_are_rejected_with_valid_values() {
    for (flags, part) in [
        ("--policy fgdd", "fragmentation, binpack, spread, fgd, bestfit]"),
        ("--seeds 51..42", "the first seed is greater than the last one"),
        ("--seeds 1..x", "expected two whole numbers such as 42..51"),
        ("--seeds 1..99999", "more than 10000 seeds"),
        ("--seed 1 --seeds 1..2", "cannot be used with"),
        ("--load 0", "load `0` is not allowed, expected more than 0 and at most 100"),
        ("--load -1", "load `-1` is not allowed"),
        ("--output xml", "table, json, csv"),
        ("--churn 0", "mean load `0` is not allowed, expected more than 0 and at most 10"),
        ("--churn 0.9 --timeline", "cannot be used with"),
        ("--churn 0.9 --load 2", "cannot be used with"),
        ("--timeline --compress 2 --load 2", "cannot be used with"),
        ("--timeline --compress -1", "times `-1` as fast is not allowed"),
        ("--compress 2", "--timeline"),
        ("--queue", "--churn <LOAD>|--timeline"),
        ("--jobs 0", "--jobs <N>"),
    ] {
        let output = simulate(flags);
        let complaint = text(output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags}: {complaint}");
        assert!(complaint.contains(part), "{flags}: {complaint}");
    }
}

#[test]
fn an_unwritable_chart_is_a_separate_failure() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("charts.json")).unwrap();
    let output = simulate(&format!("--load 0.1 --charts {}", folder.path().display()));
    let complaint = text(output.stderr);
    assert_eq!(output.status.code(), Some(1), "{complaint}");
    assert!(complaint.starts_with("gpupack: --charts: cannot write `"), "{complaint}");
    assert_eq!(complaint.lines().count(), 1);
}

#[test]
fn a_reader_that_stops_early_is_not_an_error() {
    let mut child = command(NODES, PODS, "--policy bestfit --output csv")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!((child.wait().unwrap().code(), complaint.as_str()), (Some(0), ""));
}

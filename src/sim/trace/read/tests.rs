use std::error::Error;
use std::fs;

use super::*;
use crate::trace::write::{nodes_csv, pods_csv};
use engine::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse};
use engine::model::policy::Policy;
use engine::model::request::{Isolation, Limit};
use wire::device::Health;
use wire::ids::MigProfile;

const PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,\
                    creation_time,deletion_time,scheduled_time\n";
const NODES: &str = "sn,cpu_milli,memory_mib,gpu,model\n";

fn pods(rows: &str) -> Result<Vec<TracePod>, TraceError> {
    parse_pods("pods.csv", format!("{PODS}{rows}").as_bytes())
}

#[test]
fn pods_are_read_in_the_order_of_the_file() {
    let read = pods(
        "b,12000,16384,1,460,T4|P100|T4,LS,Running,5,12537496,5\n\
                     a,8000,30517,0,0,,BE,Failed,7,,\n",
    )
    .unwrap();
    let shared = TracePod {
        name: "b".to_owned(),
        cpu_milli: 12_000,
        memory_mib: 16_384,
        num_gpu: 1,
        gpu_milli: 460,
        gpu_spec: ["T4", "P100", "T4"].map(str::to_owned).to_vec(),
        creation_time: Some(5),
        deletion_time: Some(12_537_496),
        more: None,
    };
    let cpu_only = TracePod {
        name: "a".to_owned(),
        cpu_milli: 8000,
        memory_mib: 30_517,
        num_gpu: 0,
        gpu_milli: 0,
        gpu_spec: Vec::new(),
        creation_time: Some(7),
        deletion_time: None,
        more: None,
    };
    assert_eq!((shared.demand_milli(), cpu_only.demand_milli()), (460, 0));
    assert_eq!(read, [shared, cpu_only]);
}

#[test]
fn columns_are_found_by_the_header_and_the_optional_ones_may_be_absent() {
    let text = "\u{feff}gpu_milli, num_gpu ,name,memory_mib,cpu_milli\r\n1000,8, p ,2,1\r\n";
    let read = parse_pods("pods.csv", text.as_bytes()).unwrap();
    assert_eq!((read[0].name.as_str(), read[0].demand_milli()), ("p", 8000));
    assert_eq!((read[0].gpu_spec.len(), read[0].creation_time), (0, None));
}

#[test]
fn quotes_are_removed_and_an_unclosed_one_is_a_bad_row() {
    let text = "\u{feff}\"name\",\"cpu_milli\",memory_mib,num_gpu,gpu_milli,\"gpu_spec\"\r\n\
                \"p\",\"1\",\" 2\",1,\"500\",\"T4|P100\"\r\n";
    let read = parse_pods("pods.csv", text.as_bytes()).unwrap();
    assert_eq!((read[0].name.as_str(), read[0].memory_mib, read[0].demand_milli()), ("p", 2, 500));
    assert_eq!(read[0].gpu_spec, ["T4", "P100"]);
    let refused = pods("g,1,1,0,0,,,,,,\n\"p,1,1,0,0,,,,,,\nq,1,1,0,0,,,,,,\n").unwrap_err();
    let expected = "`pods.csv` line 3: 1 values, expected 11 as in the header";
    assert_eq!(refused.to_string(), expected);
}

/// Endless text: rows as short as can be, each with a name of its own, or one line.
struct Endless {
    row: Option<u32>,
    rest: Vec<u8>,
    served: usize,
}

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.rest.is_empty() {
            self.rest = match &mut self.row {
                Some(row) => {
                    *row += 1;
                    format!("{row:x},,,0,\n").into_bytes()
                }
                None => vec![b'x'; 1 << 16],
            };
        }
        let count = self.rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.rest[..count]);
        self.rest.drain(..count);
        self.served += count;
        Ok(count)
    }
}

#[test]
fn an_endless_file_is_rejected_before_it_fills_memory() {
    let mut line = Endless { row: None, rest: PODS.as_bytes().to_vec(), served: 0 };
    let refused = parse_pods("pods.csv", &mut line).unwrap_err();
    assert_eq!(refused.to_string(), "cannot read `pods.csv`");
    assert_eq!(refused.source().unwrap().to_string(), "line 2 is longer than 1048576 bytes");
    assert!(line.served < 2 << 20);

    let header = b"name,a,b,num_gpu,c\n".to_vec();
    let mut rows = Endless { row: Some(0), rest: header, served: 0 };
    let mut table = CsvTable::new("pods.csv", &mut rows).unwrap();
    table.rows_max = 1000;
    let refused = table.rows(|row| Ok(row.text("name").to_owned()), |name| name);
    let refused = refused.unwrap_err().to_string();
    assert_eq!(refused, "`pods.csv` is too large: allowed are 1000000 rows and 268435456 bytes");
    assert!(rows.served < 1 << 20);
}

#[test]
fn pods_for_absent_models_are_counted() {
    let nodes = parse_nodes("n.csv", format!("{NODES}a,1,1,1,V100M16\nb,1,1,0,P4\n").as_bytes());
    let pods = pods(
        "p,1,1,1,1,,,,,,\nq,1,1,1,1,V100M16|T4,,,,,\nr,1,1,1,1,T4,,,,,\n\
         s,1,1,1,1,P4,,,,,\nt,1,1,0,0,T4,,,,,\nu,1,1,1,1,T4,,,,,\n",
    );
    assert_eq!(pods_of_unknown_models(&nodes.unwrap(), &pods.unwrap()), 3);
}

#[test]
fn a_node_is_named_by_its_serial_number_or_its_name() {
    for (title, model) in [("sn", "V100M16"), ("name", "")] {
        let text = format!("{title},cpu_milli,memory_mib,gpu,model\nn1,96000,393216,8,{model}\n");
        let read = parse_nodes("nodes.csv", text.as_bytes()).unwrap();
        assert_eq!((read[0].name.as_str(), read[0].model.as_str()), ("n1", model));
        assert_eq!((read[0].gpus, read[0].capacity_milli()), (8, 8000));
    }
    let both = "name,sn,cpu_milli,memory_mib,gpu,model,name\n-,n1,1,1,1,,-\n";
    assert_eq!(parse_nodes("nodes.csv", both.as_bytes()).unwrap()[0].name, "n1");
}

#[test]
fn a_bad_row_is_reported_with_line_column_value_and_valid_values() {
    let good = "g,1,1,0,0,,,,,,\n";
    let long = "x".repeat(1000);
    let cases = [
        (
            "p,-1,1,0,0,,,,,,",
            "`cpu_milli`: `-1` is not allowed, expected a whole number from 0 to 10000000",
        ),
        ("p,+1,1,0,0,,,,,,", "`cpu_milli`: `+1`"),
        ("p,nan,1,0,0,,,,,,", "`cpu_milli`: `nan`"),
        ("p,1e3,1,0,0,,,,,,", "`cpu_milli`: `1e3`"),
        ("p,0x10,1,0,0,,,,,,", "`cpu_milli`: `0x10`"),
        ("p,1,inf,0,0,,,,,,", "`memory_mib`: `inf`"),
        ("p,\"1,000\",1,0,0,,,,,,", "`cpu_milli`: `1,000`"),
        ("p,,1,0,0,,,,,,", "`cpu_milli`: ``"),
        ("p,1,1.5,0,0,,,,,,", "`memory_mib`: `1.5`"),
        ("p,1,99999999999999999999999,0,0,,,,,,", "`memory_mib`: `99999999999999999999999`"),
        (
            "p,1,1,257,1000,,,,,,",
            "`num_gpu`: `257` is not allowed, expected a whole number from 0 to 256",
        ),
        ("p,1,1,0,5,,,,,,", "`gpu_milli`: `5` is not allowed, expected 0"),
        (
            "p,1,1,1,0,,,,,,",
            "`gpu_milli`: `0` is not allowed, expected thousandths above 0 up to 1000, with at most",
        ),
        ("p,1,1,1,1001,,,,,,", "`gpu_milli`: `1001`"),
        ("p,1,1,1,,,,,,,", "`gpu_milli`: ``"),
        ("p,1,1,1,1.0001,,,,,,", "`gpu_milli`: `1.0001`"),
        ("p,1,1,1,1,T4||P4,,,,,", "`gpu_spec`: `T4||P4` is not allowed, expected GPU models"),
        ("p,1,1,1,1,T\u{7}4,,,,,", "`gpu_spec`: `T\\u{7}4`"),
        ("p,1,1,1,1,,,,soon,,", "`creation_time`: `soon`"),
        ("p,1,1,1,1,,,,1,10000000000,", "`deletion_time`: `10000000000`"),
        (",1,1,0,0,,,,,,", "`name`: `` is not allowed, expected 1 to 253 ASCII"),
        ("a b,1,1,0,0,,,,,,", "`name`: `a b`"),
        (&format!("{long},1,1,0,0,,,,,,"), &format!("`name`: `{}` is", &long[..40])),
    ];
    for (row, expected) in cases {
        let refused = pods(&format!("{good}{row}\n")).unwrap_err().to_string();
        let expected = format!("`pods.csv` line 3, column {expected}");
        assert!(refused.starts_with(&expected), "{refused}\ninstead of\n{expected}");
    }
    let refused = parse_nodes("n.csv", format!("{NODES}n,1,1,8,a|b\n").as_bytes());
    let expected = "`n.csv` line 2, column `model`: `a|b` is not allowed, expected at most 253 \
                    bytes without `|` or control characters";
    assert_eq!(refused.unwrap_err().to_string(), expected);
}

const MORE_PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib,mig_profile,\
    gpu_slots,isolation,limit_milli,limit_gpu_memory_mib,policy,min_gpu_memory_mib,priority,node,\
    devices,placed_isolation\n";

const MORE_NODES: &str = "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,gpu_models,mig,slots,\
    mig_instances,enforcement,unavailable,other_use_mib\n";

#[test]
fn pods_request_in_all_dimensions() {
    let rows = [
        "plain,1,1,1,250,,,,,,,,,,,,",
        "fine,1,1,1,333.33,,,,none,500,,,,,,,",
        "several,1,1,3,500,,,,,,,,,,,,",
        "memory,1,1,1,,8192,,,memory,,12288,,,,,,",
        "both,1,1,2,250,10240,,,,1000,,,,,,,",
        "mig,1,1,2,0,,3g.20gb,,,,,,,,,,",
        "slot,1,1,1,0,,,1,,,,,,,,,",
        "rest,1,1,1,1000,0,,0,hardware,,,spread,64,-7,,,",
        "placed,1,1,2,100,,,,,,,,,,n.1,0:1536:100|1.2:9728:1000,mps",
        "host,1,1,0,0,,,,,,,,,9,n.1,,",
    ];
    let text = format!("{MORE_PODS}{}\n", rows.join("\n"));
    let read = parse_pods("pods.csv", text.as_bytes()).unwrap();
    let share = Share::from_millionths;
    let mib = MemMib::new;
    let requests: Vec<_> =
        read.iter().map(|pod| pod.request().map(|request| request.amount)).collect();
    let expected = [
        Some(Amount::Fraction(share(250_000))),
        Some(Amount::Fraction(share(333_330))),
        Some(Amount::Fraction(share(500_000))),
        Some(Amount::Memory(mib(8192))),
        Some(Amount::FractionAndMemory(share(250_000), mib(10_240))),
        Some(Amount::MigInstance(MigProfile::new("3g.20gb"))),
        Some(Amount::SharedSlot),
        Some(Amount::Whole),
        Some(Amount::Fraction(share(100_000))),
        None,
    ];
    assert_eq!(requests, expected);
    assert_eq!(read.iter().filter(|pod| pod.more.is_none()).count(), 2, "plain and several");
    let limits: Vec<_> =
        read.iter().map(|pod| pod.request().and_then(|request| request.limit)).collect();
    assert_eq!(limits[1], Some(Limit::Fraction(share(500_000))));
    assert_eq!(limits[3], Some(Limit::Memory(mib(12_288))));
    let rest = read[7].request().unwrap();
    assert_eq!((rest.isolation, rest.policy), (Isolation::Hardware, Some(Policy::Spread)));
    assert_eq!((rest.min_memory, read[7].priority(), read[9].priority()), (mib(64), -7, 9));
    let placed = read[8].placed().unwrap();
    assert_eq!((placed.node.as_str(), placed.isolation), ("n.1", ConfiguredIsolation::Mps));
    let [whole, part] = placed.devices[..] else { panic!("{placed:?}") };
    assert_eq!((whole.0.to_string(), whole.1.share), ("0".to_owned(), share(100_000)));
    assert_eq!((part.0.to_string(), part.1.memory), ("1.2".to_owned(), mib(9728)));
    assert_eq!(parse_pods("again", pods_csv(&read).unwrap().as_slice()).unwrap(), read);
}

#[test]
fn a_whole_instance_may_serve_an_amount_of_memory() {
    let header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib,by_instance\n";
    let text = format!("{header}a,1,1,1,,9,true\nb,1,1,1,,9,false\nc,1,1,1,,9,\n");
    let read = parse_pods("pods.csv", text.as_bytes()).unwrap();
    assert_eq!([0, 1, 2].map(|at| read[at].request().unwrap().by_instance), [true, false, false]);
    assert_eq!(parse_pods("again", pods_csv(&read).unwrap().as_slice()).unwrap(), read);
    for (row, expected) in [
        ("p,1,1,1,,9,yes", "`yes` is not allowed, expected `true` or `false`"),
        ("p,1,1,0,0,,true", "`true` is not allowed, expected nothing, as `num_gpu` is 0"),
    ] {
        let refused = parse_pods("p.csv", format!("{header}{row}\n").as_bytes()).unwrap_err();
        assert_eq!(
            refused.to_string(),
            format!("`p.csv` line 2, column `by_instance`: {expected}")
        );
    }
}

#[test]
fn nodes_have_memory_instances_and_the_rules_of_their_pool() {
    let rows = [
        "plain,1,1,2,T4,,,,,,,,",
        "memory,1,1,2,T4,14910,,,,,,,",
        "mixed,1,1,2,T4,14910|40379,T4|A100,,,,,1,0:12|1:1",
        "cut,1,1,2,NVIDIA A100-SXM4-40GB,40379,,3g.20gb 1g.5gb:4800|,,shared,mps,0.1,0.0:5",
        "slots,1,1,1,L4,22558,,,4,whole,none,,",
    ];
    let text = format!("{MORE_NODES}{}\n", rows.join("\n"));
    let read = parse_nodes("nodes.csv", text.as_bytes()).unwrap();
    assert_eq!(read[0].more, None);
    let capacity: Vec<u64> = read.iter().map(TraceNode::capacity_milli).collect();
    assert_eq!(capacity, [2000, 2000, 2000, 3000, 1000]);
    let devices = |at: usize| read[at].devices(0).unwrap();
    let memory = |at: usize| -> Vec<u64> {
        devices(at).iter().map(|device| device.device.capacity().mib()).collect()
    };
    assert_eq!((memory(0), memory(1)), (vec![15_360; 2], vec![14_910; 2]));
    assert_eq!((memory(2), memory(3)), (vec![14_910, 40_379], vec![40_960, 19_968, 4800, 40_379]));
    let [_, part, small, other] = &devices(3)[..] else { panic!("{:?}", devices(3)) };
    assert_eq!([part, small, other].map(|device| device.at.to_string()), ["0.0", "0.1", "1"]);
    assert_eq!((part.device.health, small.device.health), (Health::Healthy, Health::Unhealthy));
    assert_eq!(devices(2)[1].device.model.as_str(), "A100");
    assert!(read[3].has_device(small.at) && read[3].has_device(other.at));
    assert!(!read[3].has_device(DeviceAt { gpu: 0, instance: None }), "a GPU in MIG mode");
    let rules: Vec<PoolRule> = read.iter().map(TraceNode::rule).collect();
    assert_eq!(rules[4].replicas.map(|slots| slots.count()), Some(4));
    assert_eq!((rules[3].instances, rules[3].enforcement), (InstanceUse::Shared, Enforcement::Mps));
    assert_eq!(parse_nodes("again", nodes_csv(&read).unwrap().as_slice()).unwrap(), read);
}

#[test]
fn a_bad_optional_value_is_reported_with_line_column_and_fix() {
    for (row, expected) in [
        ("p,1,1,0,0,5,,,,,,,,,,,", "`gpu_memory_mib`: `5` is not allowed, expected nothing, as"),
        ("p,1,1,0,0,,,,,,,spread,,,,,", "`policy`: `spread` is not allowed, expected nothing"),
        ("p,1,1,1,,-1,,,,,,,,,,,", "`gpu_memory_mib`: `-1` is not allowed, expected MiB from 0"),
        ("p,1,1,1,500,,1g.5gb,,,,,,,,,,", "`mig_profile`: `1g.5gb` is not allowed, expected a"),
        ("p,1,1,1,0,,1g 5gb,,,,,,,,,,", "`mig_profile`: `1g 5gb` is not allowed, expected the"),
        ("p,1,1,2,0,,,1,,,,,,,,,", "`gpu_slots`: `1` is not allowed, expected `1`, with"),
        ("p,1,1,1,0,,,2,,,,,,,,,", "`gpu_slots`: `2`"),
        ("p,1,1,1,9,,,,full,,,,,,,,", "`isolation`: `full` is not allowed, expected `none`, `me"),
        ("p,1,1,1,500,,,,,400,,,,,,,", "`limit_milli`: `400` is not allowed, expected thousandt"),
        ("p,1,1,1,,500,,,,900,,,,,,,", "`limit_milli`: `900`"),
        ("p,1,1,1,500,,,,,,400,,,,,,", "`limit_gpu_memory_mib`: `400` is not allowed, expected"),
        ("p,1,1,1,5,9,,,,9,9,,,,,,", "`limit_milli`: `9` is not allowed, expected nothing beside"),
        ("p,1,1,1,5,,,,,,,best,,,,,", "`policy`: `best` is not allowed, expected `binpack`, `s"),
        ("p,1,1,1,5,,,,,,,,x,,,,", "`min_gpu_memory_mib`: `x`"),
        ("p,1,1,1,5,,,,,,,,,+1,,,", "`priority`: `+1` is not allowed, expected a whole number of"),
        ("p,1,1,1,5,,,,,,,,,2147483648,,,", "`priority`: `2147483648`"),
        ("p,1,1,1,5,,,,,,,,,,,0:1:1,", "`devices`: `0:1:1` is not allowed, expected nothing wit"),
        ("p,1,1,1,5,,,,,,,,,,n,0:1:1|0:1:1,", "`devices`: `0:1:1|0:1:1` is not allowed, expec"),
        ("p,1,1,1,5,,,,,,,,,,n,0:1:1,x", "`placed_isolation`: `x` is not allowed, expected `no"),
    ] {
        let text = format!("{MORE_PODS}{row}\n");
        let refused = parse_pods("p.csv", text.as_bytes()).unwrap_err().to_string();
        let expected = format!("`p.csv` line 2, column {expected}");
        assert!(refused.starts_with(&expected), "{refused}\ninstead of\n{expected}");
    }
    let many = vec!["1g.5gb"; 257].join(" ");
    for (row, expected) in [
        ("n,1,1,0,,5,,,,,,,", "`gpu_memory_mib`: `5` is not allowed, expected nothing, for"),
        ("n,1,1,2,T4,1|2|3,,,,,,,", "`gpu_memory_mib`: `1|2|3` is not allowed, expected 2 values"),
        ("n,1,1,2,T4,1|x,,,,,,,", "`gpu_memory_mib`: `1|x` is not allowed, expected MiB from 1"),
        ("n,1,1,2,T4,,A|B|C,,,,,,", "`gpu_models`: `A|B|C` is not allowed, expected 2 values"),
        ("n,1,1,1,T4,,,1g.5gb,,,,,", "`mig`: `1g.5gb` is not allowed, expected `profile:MiB`"),
        ("n,1,1,1,T4,,,1g.5gb:0,,,,,", "`mig`: `1g.5gb:0`"),
        (
            "n,1,1,1,A100,40379,,9g.5gb:4864,,,,,",
            "`mig`: `9g.5gb:4864` is not allowed, expected devices that a node can have: a GPU of \
             model `A100` has no MIG profile `9g.5gb`",
        ),
        (
            "n,1,1,1,A100,40379,,7g.40gb 1g.5gb,,,,,",
            "`mig`: `7g.40gb 1g.5gb` is not allowed, expected devices that a node can have",
        ),
        (
            &format!("n,1,1,1,A100,40379,,{many},,,,,"),
            &format!("`mig`: `{}` is not allowed, expected at most 256 devices", &many[..40]),
        ),
        ("n,1,1,1,T4,,,,1,,,,", "`slots`: `1` is not allowed, expected a whole number from 2"),
        ("n,1,1,1,T4,,,,,some,,,", "`mig_instances`: `some` is not allowed, expected `whole`"),
        ("n,1,1,1,T4,,,,,,cuda,,", "`enforcement`: `cuda` is not allowed, expected `none`, `mp"),
        ("n,1,1,1,T4,,,,,,,1,", "`unavailable`: `1` is not allowed, expected devices of the"),
        ("n,1,1,1,T4,,,,,,,,0:1|0:2", "`other_use_mib`: `0:1|0:2` is not allowed, expected"),
    ] {
        let text = format!("{MORE_NODES}{row}\n");
        let refused = parse_nodes("n.csv", text.as_bytes()).unwrap_err().to_string();
        let expected = format!("`n.csv` line 2, column {expected}");
        assert!(refused.starts_with(&expected), "{refused}\ninstead of\n{expected}");
    }
}

#[test]
fn requests_without_a_share_count_as_part_of_the_smallest_device_that_is_large_enough() {
    let nodes = format!(
        "{MORE_NODES}a,1,1,1,T4,10000,,,,,,,\nb,1,1,2,H100,80000,,,,,,,\nc,1,1,1,L4,20000,,,4,,,,\n"
    );
    let nodes = parse_nodes("n.csv", nodes.as_bytes()).unwrap();
    let sized = |row: &str| {
        let text = format!("{MORE_PODS}{row}\n");
        let mut pods = parse_pods("p.csv", text.as_bytes()).unwrap();
        size_up(&nodes, &mut pods);
        pods[0].demand_milli()
    };
    assert_eq!(sized("p,1,1,1,,5000,,,,,,,,,,,"), 500);
    assert_eq!(sized("p,1,1,2,,16000,,,,,,,,,,,"), 2000, "in slots of 5,000 MiB");
    assert_eq!(sized("p,1,1,1,,30000,,,,,,,,,,,"), 375);
    assert_eq!(sized("p,1,1,1,,90000,,,,,,,,,,,"), 1000, "fits nowhere");
    assert_eq!(sized("p,1,1,1,0,,,1,,,,,,,,,"), 250);
    assert_eq!(sized("p,1,1,1,100,5000,,,,,,,,,,,"), 100);
    assert_eq!(sized("p,1,1,3,0,,1g.5gb,,,,,,,,,,"), 3000);
}

#[test]
fn a_table_that_is_not_a_trace_is_rejected() {
    let cases = [
        ("", "`n.csv` holds no rows"),
        (NODES, "`n.csv` holds no rows"),
        ("\n\n", "`n.csv` holds no rows"),
        ("sn,cpu_milli,memory_mib,gpu\n", "`n.csv` has no column `model`"),
        ("cpu_milli,memory_mib,gpu,model\n", "`n.csv` has no column `name`"),
        ("sn,sn,cpu_milli\n", "`n.csv` has the column `sn` more than once"),
        (
            &format!("{NODES}a,1,1,1,m\nb,1\n"),
            "`n.csv` line 3: 2 values, expected 5 as in the header",
        ),
        (
            &format!("{NODES}a,1,1,1,m\n\nb,1,1,1,m\na,2,2,2,m\n"),
            "`n.csv` line 5: the name `a` was already used on line 2",
        ),
    ];
    for (text, expected) in cases {
        let refused = parse_nodes("n.csv", text.as_bytes()).unwrap_err();
        assert_eq!(refused.to_string(), expected, "{text:?}");
    }
}

#[test]
fn text_that_is_not_utf_8_is_rejected_with_line_and_column() {
    for (text, expected) in [
        ([NODES.as_bytes(), b"a,1,1,1,\xff\n"].concat(), "`n.csv` line 2, column `model`"),
        ([b"\r\n\xff", NODES.as_bytes()].concat(), "`n.csv` line 2"),
    ] {
        let refused = parse_nodes("n.csv", text.as_slice()).unwrap_err().to_string();
        assert_eq!(refused, format!("{expected}: the text is not UTF-8"));
    }
}

/// However lines end, and whatever is read at a time.
#[test]
fn lines_are_counted_as_editors_do() {
    struct Slowly<'t>(&'t [u8], usize);
    impl Read for Slowly<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let most = self.1.min(buffer.len());
            self.0.read(&mut buffer[..most])
        }
    }
    let many = "b,1,1,1,m\n".repeat(2_000);
    for (rows, fault) in [
        ("a,1,1,1,m\na,1,1,1,m\n", "line 3: the name `a` was already used on line 2"),
        ("\n\na,1,1,1,m\n\na,1,1,1,m", "line 6: the name `a` was already used on line 4"),
        ("\n\na,x,1,1,m\n", "line 4, column `cpu_milli`"),
        ("\na,1\n", "line 3: 2 values"),
        ("\"a\n\n\",1,1,1,m\n\nb,x,1,1,m\n", "line 6, column `cpu_milli`"),
        ("\"a\n\",x,1,1,m\n", "line 2, column `cpu_milli`"),
        (&many, "line 3: the name `b` was already used on line 2"),
    ] {
        for (end, at_a_time) in
            [("\n", 9_000), ("\r\n", 9_000), ("\r", 9_000), ("\r\n", 1), ("\n", 7)]
        {
            let text = format!("{NODES}{rows}").replace('\n', end);
            let refused = parse_nodes("n.csv", Slowly(text.as_bytes(), at_a_time)).unwrap_err();
            let refused = refused.to_string();
            assert!(refused.starts_with(&format!("`n.csv` {fault}")), "{text:?}: {refused}");
        }
    }
}

#[test]
fn files_are_read_from_disk_and_a_missing_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nodes.csv");
    fs::write(&path, format!("{NODES}a,1,1,1,m\n")).unwrap();
    assert_eq!(read_nodes(&path).unwrap().len(), 1);
    let refused = read_pods(&folder.path().join("absent.csv")).unwrap_err().to_string();
    assert!(refused.starts_with("cannot open `") && refused.ends_with("absent.csv`"));
    assert!(matches!(read_nodes(folder.path()), Err(TraceError::Read { .. })));
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_read_or_rejected(bytes in proptest::collection::vec(0_u8..=255, 0..80)) {
        // With a good header and row before them, so that they get to the columns too.
        let text = [PODS.as_bytes(), b"p,1,1,1,1,,,,,,\n", &bytes].concat();
        if let Ok(read) = parse_pods("pods.csv", text.as_slice()) {
            assert_eq!(read[0].demand_milli(), 1);
        }
        let _ = parse_nodes("nodes.csv", bytes.as_slice());
    }
}

//! Reads the two CSV files of a workload trace: nodes, and the pods that ask for their GPUs.
//!
//! The format is that of the public trace `cluster-trace-gpu-v2023` (repository
//! `alibaba/clusterdata`), the data of the FGD paper. Columns are found by the header, so their
//! order is free and columns not named here are ignored. A trace is a file that somebody hands us:
//! every value is checked against a range, and the sum of any column fits in 64 bits.
//! This module never shuffles, sorts or repairs: what it returns is what the file says.

use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

use super::table::Table;
pub use super::table::TraceError;

/// Up to 10,000 cores on a node.
pub(super) const CPU_MILLI: RangeInclusive<u64> = 0..=10_000_000;
/// Up to 1 PiB on a node.
pub(super) const MEMORY_MIB: RangeInclusive<u64> = 0..=1 << 30;
/// GPUs of a node or of a pod; NVML itself counts far fewer.
const GPUS: RangeInclusive<u32> = 0..=256;
/// Seconds; wide enough for an epoch.
const SECONDS: RangeInclusive<u64> = 0..=9_999_999_999;

/// One row of the node file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceNode {
    /// Unique in the file.
    pub name: String,
    /// CPU, in thousandths of a core.
    pub cpu_milli: u64,
    /// Main memory, in MiB.
    pub memory_mib: u64,
    /// How many GPUs the node has; 0 for a node without any.
    pub gpus: u32,
    /// GPU model, as pods name it in their `gpu_spec`; may be empty.
    pub model: String,
}

impl TraceNode {
    /// The node's GPU compute in thousandths of a GPU.
    #[must_use]
    pub fn capacity_milli(&self) -> u64 {
        u64::from(self.gpus) * 1000
    }
}

/// One row of the pod file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracePod {
    /// Unique in the file.
    pub name: String,
    /// CPU request, in thousandths of a core.
    pub cpu_milli: u64,
    /// Main memory request, in MiB.
    pub memory_mib: u64,
    /// How many GPUs the pod asks for; 0 for a CPU-only pod.
    pub num_gpu: u32,
    /// Share of each GPU, in thousandths: 0 without GPUs, 1..=1000 of one, 1000 of each of several.
    pub gpu_milli: u32,
    /// Models the pod accepts, in the file's order, repetitions kept; empty accepts any.
    pub gpu_spec: Vec<String>,
    /// When the pod was submitted, in seconds since the trace began, if the file says so.
    pub creation_time: Option<u64>,
    /// When the pod was gone, in seconds since the trace began, if the file says so.
    pub deletion_time: Option<u64>,
}

impl TracePod {
    /// All the pod asks for, over its GPUs, in thousandths of a GPU.
    #[must_use]
    pub fn demand_milli(&self) -> u64 {
        u64::from(self.num_gpu) * u64::from(self.gpu_milli)
    }
}

/// Reads the node file at `path`, in the file's order.
///
/// # Errors
/// Any [`TraceError`].
pub fn read_nodes(path: &Path) -> Result<Vec<TraceNode>, TraceError> {
    let file = path.display().to_string();
    parse_nodes(&file, open(path, &file)?)
}

/// Reads the pod file at `path`, in the file's order.
///
/// # Errors
/// Any [`TraceError`].
pub fn read_pods(path: &Path) -> Result<Vec<TracePod>, TraceError> {
    let file = path.display().to_string();
    parse_pods(&file, open(path, &file)?)
}

fn open(path: &Path, file: &str) -> Result<File, TraceError> {
    File::open(path).map_err(|source| TraceError::Open { file: file.to_owned(), source })
}

/// Reads nodes from `reader`; `file` is its name in errors.
///
/// The name stands in the column `sn` or, where there is none, `name`.
///
/// # Errors
/// Any [`TraceError`] but `Open`.
pub fn parse_nodes(file: &str, reader: impl Read) -> Result<Vec<TraceNode>, TraceError> {
    let mut table = Table::new(file, reader)?;
    let name = match table.find("sn")? {
        Some(column) => column,
        None => table.require("name")?,
    };
    let [cpu, memory] = [table.require("cpu_milli")?, table.require("memory_mib")?];
    let [gpus, model] = [table.require("gpu")?, table.require("model")?];
    table.rows(name, |row| {
        Ok(TraceNode {
            name: row.text(name).to_owned(),
            cpu_milli: row.number(cpu, CPU_MILLI)?,
            memory_mib: row.number(memory, MEMORY_MIB)?,
            gpus: row.number(gpus, GPUS)?,
            model: row.model(model)?,
        })
    })
}

/// Reads pods from `reader`; `file` is its name in errors.
///
/// The columns `gpu_spec`, `creation_time` and `deletion_time` may be absent.
///
/// # Errors
/// Any [`TraceError`] but `Open`.
pub fn parse_pods(file: &str, reader: impl Read) -> Result<Vec<TracePod>, TraceError> {
    let mut table = Table::new(file, reader)?;
    let name = table.require("name")?;
    let [cpu, memory] = [table.require("cpu_milli")?, table.require("memory_mib")?];
    let [num, milli] = [table.require("num_gpu")?, table.require("gpu_milli")?];
    let spec = table.find("gpu_spec")?;
    let [created, deleted] = [table.find("creation_time")?, table.find("deletion_time")?];
    table.rows(name, |row| {
        let num_gpu = row.number(num, GPUS)?;
        let shares: RangeInclusive<u32> = match num_gpu {
            0 => 0..=0,
            1 => 1..=1000,
            2.. => 1000..=1000,
        };
        Ok(TracePod {
            name: row.text(name).to_owned(),
            cpu_milli: row.number(cpu, CPU_MILLI)?,
            memory_mib: row.number(memory, MEMORY_MIB)?,
            num_gpu,
            gpu_milli: row.number(milli, shares)?,
            gpu_spec: spec.map_or(Ok(Vec::new()), |column| row.models(column))?,
            creation_time: created.map_or(Ok(None), |column| row.number_if_any(column, SECONDS))?,
            deletion_time: deleted.map_or(Ok(None), |column| row.number_if_any(column, SECONDS))?,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::fs;

    use super::*;

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
    fn a_node_is_named_by_its_serial_number_or_its_name() {
        for (title, model) in [("sn", "V100M16"), ("name", "")] {
            let text =
                format!("{title},cpu_milli,memory_mib,gpu,model\nn1,96000,393216,8,{model}\n");
            let read = parse_nodes("nodes.csv", text.as_bytes()).unwrap();
            assert_eq!((read[0].name.as_str(), read[0].model.as_str()), ("n1", model));
            assert_eq!((read[0].gpus, read[0].capacity_milli()), (8, 8000));
        }
    }

    #[test]
    fn a_bad_row_is_named_with_line_column_value_and_what_is_allowed() {
        let good = "g,1,1,0,0,,,,,,\n";
        let long = "x".repeat(1000);
        let cases = [
            (
                "p,-1,1,0,0,,,,,,",
                "`cpu_milli`: `-1` is not allowed, expected a whole number from 0 to 10000000",
            ),
            ("p,+1,1,0,0,,,,,,", "`cpu_milli`: `+1`"),
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
                "`gpu_milli`: `0` is not allowed, expected a whole number from 1 to 1000",
            ),
            ("p,1,1,1,1001,,,,,,", "`gpu_milli`: `1001`"),
            ("p,1,1,2,500,,,,,,", "`gpu_milli`: `500` is not allowed, expected 1000"),
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

    #[test]
    fn a_table_that_is_no_trace_is_refused_as_a_whole() {
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
    fn text_that_is_not_utf_8_is_refused_with_its_place() {
        let refused =
            parse_nodes("n.csv", [NODES.as_bytes(), b"a,1,1,1,\xff\n"].concat().as_slice());
        let refused = refused.unwrap_err();
        assert_eq!(refused.to_string(), "cannot read `n.csv`");
        assert!(refused.source().unwrap().to_string().contains("line 2"), "{refused:?}");
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
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(0_u8..=255, 0..80)) {
            // With a good header and row before them, so that they reach the columns too.
            let text = [PODS.as_bytes(), b"p,1,1,1,1,,,,,,\n", &bytes].concat();
            if let Ok(read) = parse_pods("pods.csv", text.as_slice()) {
                assert_eq!(read[0].demand_milli(), 1);
            }
            let _ = parse_nodes("nodes.csv", bytes.as_slice());
        }
    }
}

//! Figures of this node's GPUs for Prometheus, on an endpoint of the agent's own.
//!
//! One node has few GPUs, so each has its own series here; the extender, which has them all, exports
//! sums only. `UUID`, `gpu` and `Hostname` are spelt as DCGM's exporter spells them, so that both can
//! be joined. What the driver cannot say has no series: zero would be a lie.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use prometheus::{
    Encoder, GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry, TEXT_FORMAT, TextEncoder,
};

use super::probe::Sample;
use crate::report::{Booking, DeviceReport, DeviceUse, ProcessUse};

/// Labels of every series of a GPU.
const LABELS: [&str; 4] = ["UUID", "gpu", "Hostname", "model"];

/// Figures of the GPUs of one node; a handle, cheap to copy.
#[derive(Clone, Debug)]
pub struct AgentMetrics(Arc<Mutex<Families>>);

/// The families, and the devices that have series in them.
#[derive(Debug)]
struct Families {
    registry: Registry,
    memory: IntGaugeVec,
    busy: GaugeVec,
    healthy: IntGaugeVec,
    xids: IntCounterVec,
    shown: BTreeSet<[String; 4]>,
}

impl Default for AgentMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl AgentMetrics {
    /// All families, without any device.
    ///
    /// # Panics
    /// Never: the names are constants, and the registry is new.
    pub fn new() -> Self {
        let labels = |more: &[&'static str]| [&LABELS[..], more].concat();
        let opts = |name: &str, help: &str| Opts::new(name, help);
        let memory = opts("gpupack_gpu_memory_bytes", "Memory of a device, by what it is.");
        let busy = opts("gpupack_gpu_busy_ratio", "Part of the time in which a kernel ran.");
        let healthy = opts("gpupack_gpu_healthy", "1 when the device may take new tenants.");
        let xids = opts("gpupack_gpu_xid_errors_total", "Xids since the agent's start.");
        let build = opts("gpupack_build_info", "Always 1; the running version.")
            .const_label("version", env!("CARGO_PKG_VERSION"))
            .const_label("component", "agent");
        let families = || {
            let families = Families {
                registry: Registry::new(),
                memory: IntGaugeVec::new(memory, &labels(&["kind"]))?,
                busy: GaugeVec::new(busy, &labels(&[]))?,
                healthy: IntGaugeVec::new(healthy, &labels(&[]))?,
                xids: IntCounterVec::new(xids, &labels(&["class"]))?,
                shown: BTreeSet::new(),
            };
            let build = prometheus::IntGauge::with_opts(build)?;
            build.set(1);
            families.registry.register(Box::new(build))?;
            families.registry.register(Box::new(families.memory.clone()))?;
            families.registry.register(Box::new(families.busy.clone()))?;
            families.registry.register(Box::new(families.healthy.clone()))?;
            families.registry.register(Box::new(families.xids.clone()))?;
            Ok::<_, prometheus::Error>(families)
        };
        Self(Arc::new(Mutex::new(families().expect("the names are constants, each used once"))))
    }

    /// Shows a sample of `node`, beside what is booked there.
    pub fn show(&self, node: &str, sample: &Sample, bookings: &[Booking]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).show(node, sample, bookings);
    }

    /// All series in Prometheus' text format.
    pub fn text(&self) -> Vec<u8> {
        let families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = Vec::new();
        let encoded = TextEncoder::new().encode(&families.registry.gather(), &mut text);
        encoded.expect("writing to memory does not fail, and every family has a name");
        text
    }

    /// Answers `GET /metrics` on `listener` for ever.
    ///
    /// # Errors
    /// What the operating system says about the listener.
    pub async fn serve(self, listener: std::net::TcpListener) -> std::io::Result<()> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let answer = move || {
            let text = self.text();
            async move { ([(CONTENT_TYPE, TEXT_FORMAT)], text) }
        };
        axum::serve(listener, Router::new().route("/metrics", get(answer))).await
    }
}

/// Opens the port of the endpoint.
///
/// # Errors
/// What the operating system says, for instance that the port is taken.
pub fn listen(address: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    std::net::TcpListener::bind(address)
}

impl Families {
    /// Shows a sample.
    fn show(&mut self, node: &str, sample: &Sample, bookings: &[Booking]) {
        let uses: BTreeMap<&str, &DeviceUse> =
            sample.uses.iter().map(|it| (it.uuid.as_str(), it)).collect();
        let mut shown = BTreeSet::new();
        for device in sample.inventory.iter() {
            let labels = [&device.uuid, &device.index.to_string(), node, &device.model]
                .map(|it: &str| it.to_owned());
            if let Some(seen) = uses.get(device.uuid.as_str()) {
                self.show_device(&labels.each_ref().map(String::as_str), device, seen, bookings);
            }
            let counts = sample.xids.get(&device.uuid).copied().unwrap_or_default();
            for (class, count) in [("application", counts.application), ("device", counts.device)] {
                let series = self.xids.with_label_values(&with(&labels, class));
                if count < series.get() {
                    series.reset(); // the GPU was away, and is counted anew
                }
                series.inc_by(count.saturating_sub(series.get()));
            }
            shown.insert(labels);
        }
        for gone in self.shown.difference(&shown) {
            self.forget(gone);
        }
        self.shown = shown;
    }

    /// Shows one device.
    fn show_device(
        &self,
        labels: &[&str; 4],
        device: &DeviceReport,
        seen: &DeviceUse,
        bookings: &[Booking],
    ) {
        self.healthy.with_label_values(labels).set(i64::from(seen.healthy));
        match seen.busy_percent {
            Some(percent) => {
                self.busy.with_label_values(labels).set(f64::from(percent) / 100.0);
            }
            None => drop(self.busy.remove_label_values(labels)),
        }
        let held = held(&device.uuid, bookings);
        let booked = held.values().fold(0, |sum: u64, mib| sum.saturating_add(*mib));
        let capacity = device.memory_mib.saturating_sub(device.reserved_mib);
        self.set_memory(labels, "capacity", Some(capacity));
        self.set_memory(labels, "reserved", Some(device.reserved_mib));
        self.set_memory(labels, "booked", Some(booked));
        self.set_memory(labels, "observed", seen.used_mib);
        if let Some(processes) = &seen.processes {
            let outside = Outside::of(processes, &held);
            self.set_memory(labels, "overuse", Some(outside.overuse_mib));
            self.set_memory(labels, "foreign", Some(outside.foreign_mib));
        } else if !seen.healthy {
            // The last list says nothing any more.
            self.set_memory(labels, "overuse", None);
            self.set_memory(labels, "foreign", None);
        }
    }

    /// Sets one amount of memory, or takes its series away.
    fn set_memory(&self, labels: &[&str; 4], kind: &str, mib: Option<u64>) {
        let labels = with(labels, kind);
        match mib {
            Some(mib) => {
                let bytes = i64::try_from(mib.saturating_mul(1 << 20)).unwrap_or(i64::MAX);
                self.memory.with_label_values(&labels).set(bytes);
            }
            None => drop(self.memory.remove_label_values(&labels)),
        }
    }

    /// Takes all series of a device away; it may have only some.
    fn forget(&self, labels: &[String; 4]) {
        let labels = labels.each_ref().map(String::as_str);
        for kind in ["capacity", "reserved", "booked", "observed", "overuse", "foreign"] {
            self.set_memory(&labels, kind, None);
        }
        drop(self.busy.remove_label_values(&labels));
        drop(self.healthy.remove_label_values(&labels));
        for class in ["application", "device"] {
            drop(self.xids.remove_label_values(&with(&labels, class)));
        }
    }
}

/// The labels of a device and one more.
fn with<'a, T: AsRef<str>>(labels: &'a [T; 4], more: &'a str) -> [&'a str; 5] {
    let [uuid, gpu, host, model] = labels.each_ref().map(AsRef::as_ref);
    [uuid, gpu, host, model, more]
}

/// MiB of the device `uuid` that each pod of the node holds, by UID; nothing of it is zero.
fn held<'a>(uuid: &str, bookings: &'a [Booking]) -> BTreeMap<&'a str, u64> {
    let mut held = BTreeMap::new();
    for booking in bookings {
        held.entry(booking.pod_uid.as_str()).or_default();
        for part in booking.devices.iter().filter(|part| part.uuid == uuid) {
            let sum = held.entry(booking.pod_uid.as_str()).or_insert(0_u64);
            *sum = sum.saturating_add(part.memory_mib);
        }
    }
    held
}

/// Memory that is used outside the bookings.
#[derive(Debug, PartialEq, Eq)]
struct Outside {
    /// Used by pods beyond what they hold.
    overuse_mib: u64,
    /// Used by processes of no pod that holds anything.
    foreign_mib: u64,
}

impl Outside {
    /// What `processes` use outside of what is `held`. What the driver cannot say counts for nothing.
    fn of(processes: &[ProcessUse], held: &BTreeMap<&str, u64>) -> Self {
        let mut used: BTreeMap<Option<&str>, u64> = BTreeMap::new();
        for process in processes {
            let sum = used.entry(process.pod_uid.as_deref()).or_default();
            *sum = sum.saturating_add(process.memory_mib.unwrap_or(0));
        }
        let mut outside = Self { overuse_mib: 0, foreign_mib: 0 };
        for (pod, mib) in used {
            let (sum, beyond) = match pod.and_then(|pod| held.get(pod)) {
                Some(held) => (&mut outside.overuse_mib, mib.saturating_sub(*held)),
                None => (&mut outside.foreign_mib, mib),
            };
            *sum = sum.saturating_add(beyond);
        }
        outside
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::health::XidCounts;
    use crate::report::{Ailment, BookedDevice, BookingState, Kind};

    fn sample(uses: Vec<DeviceUse>) -> Sample {
        let gpu = |uuid: &String| DeviceReport {
            memory_mib: 1_000,
            reserved_mib: 100,
            ..DeviceReport::new(uuid.clone(), 3, "Tesla \"T4\"".to_owned(), Kind::Gpu)
        };
        let inventory: Vec<_> = uses.iter().map(|it| gpu(&it.uuid)).collect();
        Sample {
            inventory: inventory.into(),
            uses,
            driver: None,
            xids: BTreeMap::from([("GPU-a".to_owned(), XidCounts { application: 2, device: 1 })]),
            unreadable: 0,
        }
    }

    fn process(pod: Option<&str>, memory_mib: Option<u64>) -> ProcessUse {
        ProcessUse { pid: 1, pod_uid: pod.map(str::to_owned), memory_mib }
    }

    fn seen(processes: Option<Vec<ProcessUse>>) -> DeviceUse {
        DeviceUse {
            used_mib: Some(700),
            busy_percent: Some(25),
            healthy: true,
            ailment: None,
            processes,
            ..DeviceUse::unread("GPU-a".to_owned(), Ailment::Lost)
        }
    }

    fn booking(pod: &str, memory_mib: u64) -> Booking {
        let part = BookedDevice { uuid: "GPU-a".to_owned(), memory_mib, share_millionths: 1 };
        let (pod_uid, state) = (pod.to_owned(), BookingState::Confirmed);
        Booking { pod_uid, pod: format!("d/{pod}"), state, devices: vec![part] }
    }

    /// The value of the series whose line has all `parts`.
    fn value(metrics: &AgentMetrics, parts: &[&str]) -> Option<String> {
        let text = String::from_utf8(metrics.text()).unwrap();
        let line = text.lines().find(|line| parts.iter().all(|part| line.contains(part)));
        line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.to_owned())
    }

    #[test]
    fn every_gpu_has_its_series_until_it_is_gone() {
        let metrics = AgentMetrics::new();
        let processes =
            vec![process(Some("p"), Some(400)), process(Some("q"), Some(50)), process(None, None)];
        let bookings = [booking("p", 300), booking("idle", 200)];
        metrics.show("n1", &sample(vec![seen(Some(processes))]), &bookings);
        let labels = r#"Hostname="n1",UUID="GPU-a",gpu="3""#;
        for (kind, mib) in [
            ("capacity", 900_u64),
            ("reserved", 100),
            ("booked", 500),
            ("observed", 700),
            ("overuse", 100),
            ("foreign", 50),
        ] {
            let kind = format!("kind=\"{kind}\"");
            let found = value(&metrics, &["gpupack_gpu_memory_bytes{", labels, &kind]);
            assert_eq!(found, Some((mib << 20).to_string()), "{kind}");
        }
        assert_eq!(value(&metrics, &["gpupack_gpu_busy_ratio{", labels]).unwrap(), "0.25");
        assert_eq!(value(&metrics, &["gpupack_gpu_healthy{", labels]).unwrap(), "1");
        let xids = |class: &str| value(&metrics, &["gpupack_gpu_xid_errors_total{", class]);
        assert_eq!(
            (xids("application").unwrap(), xids("device").unwrap()),
            ("2".into(), "1".into())
        );
        metrics.show("n1", &sample(vec![seen(None)]), &bookings);
        let foreign = || value(&metrics, &["kind=\"foreign\""]);
        assert_eq!(foreign().unwrap(), (50_u64 << 20).to_string(), "known from the last list");
        let lost = sample(vec![DeviceUse::unread("GPU-a".to_owned(), Ailment::Lost)]);
        metrics.show("n1", &lost, &bookings);
        assert_eq!((foreign(), value(&metrics, &["kind=\"observed\""])), (None, None));
        assert_eq!(value(&metrics, &["gpupack_gpu_healthy{"]).unwrap(), "0");
        metrics.show("n1", &sample(Vec::new()), &bookings);
        assert_eq!(value(&metrics, &["GPU-a"]), None);
        assert_eq!(value(&metrics, &["gpupack_build_info{", "agent"]).unwrap(), "1");
    }

    #[test]
    fn memory_outside_the_books_is_told_apart() {
        let held = BTreeMap::from([("p", 100), ("q", 100)]);
        for (processes, overuse_mib, foreign_mib) in [
            (vec![], 0, 0),
            (vec![process(Some("p"), Some(60)), process(Some("p"), Some(60))], 20, 0),
            (vec![process(Some("p"), Some(60)), process(Some("q"), Some(60))], 0, 0),
            (vec![process(Some("x"), Some(7)), process(None, Some(8))], 0, 15),
            (vec![process(Some("p"), None), process(None, None)], 0, 0),
            (vec![process(None, Some(u64::MAX)), process(None, Some(1))], 0, u64::MAX),
        ] {
            let found = Outside::of(&processes, &held);
            assert_eq!(found, Outside { overuse_mib, foreign_mib }, "{processes:?}");
        }
    }
}

//! The extender over HTTP, the demo's own path and the simulator place the same pods alike, in all
//! dimensions; and a snapshot has the same room.

use std::fmt::Write as _;

use rand::seq::IndexedRandom;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;
use crate::query::snapshot_state::{cluster, places};
use crate::serve::extender::settings;
use crate::simulated::fleet::{Fleet, FleetGpu, FleetInstance};
use crate::simulated::probe::SimulatedProbe;
use agent::gpu::sample::{Probe, ProcessSampling};
use agent::node::session::Session;
use engine::hardware::pool::{Enforcement, InstanceUse, PoolRule, PoolRules, Replicas};
use engine::ledger::nodes::state::Ledger;
use engine::model::policy::Policy;
use kube_api::config::file::Config;
use runtime::clock::Clock;
use server::api::reports;
use server::api::server::{router, serve};
use server::page::service::Service;
use server::views::state as state_view;
use server::views::viewer::Viewer;
use sim::run::cluster::{Seat, SimCluster};
use sim::run::placed::{end_of, keep_placements};
use sim::run::policy::SimPolicy;
use sim::snapshot::state::{ClusterPod, RowNames, Snapshot};
use sim::trace::dimensions::DeviceAt;
use sim::trace::read::{TraceNode, TracePod, parse_nodes, parse_pods};
use wire::api::state::{DeviceKind, State};
use wire::ids::{DeviceId, PoolName};
use wire::report::bodies;
use wire::units::Demand;

/// Fleets with pods that are tried.
const SEEDS: u64 = 24;

/// Pods that come to each fleet.
const PODS: usize = 60;

/// Node, and what is held of its devices.
type Placed = (String, Vec<(DeviceAt, Demand)>);

// --- fleets --------------------------------------------------------------------------------------

/// Name, memory and reserve, and sets of MIG profiles with their memory.
const A100: (&str, u64, u64) = ("NVIDIA A100-SXM4-40GB", 40_960, 581);
const MODELS: [(&str, u64, u64); 4] = [
    A100,
    ("NVIDIA H100 80GB HBM3", 81_559, 551),
    ("NVIDIA L4", 23_034, 476),
    ("Tesla T4", 15_360, 450),
];
const CUTS: [&[(&str, u64)]; 4] = [
    &[("7g.40gb", 40_192)],
    &[("3g.20gb", 19_968), ("2g.10gb", 9_856), ("1g.5gb", 4_864), ("1g.5gb", 4_800)],
    &[("1g.5gb+me", 4_864), ("1g.5gb", 4_864), ("4g.20gb", 19_971)],
    &[("3g.20gb", 19_968), ("3g.20gb", 19_968)],
];

/// The rules of the pools, by number.
fn rules() -> [PoolRule; 5] {
    let shared = InstanceUse::Shared;
    [
        PoolRule::default(),
        PoolRule { replicas: Replicas::new(4), ..PoolRule::default() },
        PoolRule { enforcement: Enforcement::Mps, instances: shared, ..PoolRule::default() },
        PoolRule {
            replicas: Replicas::new(7),
            instances: shared,
            enforcement: Enforcement::Driver,
            ..PoolRule::default()
        },
        PoolRule { instances: shared, ..PoolRule::default() },
    ]
}

fn pool(number: usize) -> PoolName {
    PoolName::new(format!("pool-{number}"))
}

fn gpu(chance: &mut ChaCha8Rng, product: (&str, u64, u64)) -> FleetGpu {
    let (model, memory_mib, reserved_mib) = product;
    let is_cut = model == A100.0 && chance.random_bool(0.5);
    let cut = if is_cut { CUTS[chance.random_range(0..CUTS.len())] } else { &[] };
    let instance = |(profile, memory_mib): &(&str, u64)| FleetInstance {
        uuid: None,
        profile: (*profile).to_owned(),
        memory_mib: *memory_mib,
    };
    let mig = cut.iter().map(instance).collect();
    FleetGpu { uuid: None, model: model.to_owned(), memory_mib, reserved_mib, mig }
}

fn node(chance: &mut ChaCha8Rng, number: usize) -> FleetNode {
    let main = MODELS[chance.random_range(0..MODELS.len())];
    let is_mixed = chance.random_bool(0.2);
    let gpus = (0..chance.random_range(1..=4)).map(|_| {
        let model = if is_mixed { MODELS[chance.random_range(0..MODELS.len())] } else { main };
        let model = (model.0, model.1, model.2 + chance.random_range(0..3));
        gpu(chance, model)
    });
    let gpus: Vec<FleetGpu> = gpus.collect();
    FleetNode {
        name: format!("node-{number}"),
        cpu_milli: 1000 * chance.random_range(4..=48),
        memory_mib: 1024 * chance.random_range(16..=256),
        pool: Some(pool(chance.random_range(0..rules().len())).to_string()),
        gpus,
    }
}

/// An extender that knows this fleet.
async fn extender(fleet: &Fleet, policy: Policy, others: &[(usize, u64)]) -> (Arc<App>, ApiServer) {
    let pools = rules().into_iter().enumerate().map(|(at, rule)| (pool(at), rule));
    let hour = Duration::from_secs(3600);
    let config =
        Config { policy, pools: PoolRules::new(pools), stale_after: hour, ..Config::default() };
    let clock = Clock::start();
    let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
    ledger.share_by(config.pools.clone());
    let api = ApiServer::default();
    let app = api.extender(ledger, config, clock);
    for node in &fleet.nodes {
        let pool = PoolName::new(node.pool.as_deref().unwrap_or_default());
        app.ledger.see_node(&node.node_name(), node.host(), pool);
    }
    app.ledger.set_listed(app.clock.now());
    app.lead.set_fenced();
    let mut number = 0;
    for node in &fleet.nodes {
        let mut probe = SimulatedProbe::new(fleet, node);
        let sample = probe.sample(ProcessSampling::List, app.clock.now()).unwrap();
        let mut report = Session::new("first", 0).report(&sample);
        for device in &mut report.devices {
            // Processes outside of all pods.
            if let Some((_, mib)) = others.iter().find(|(at, _)| *at == number) {
                let process = bodies::ProcessUse { pid: 7, pod_uid: None, memory_mib: Some(*mib) };
                (device.used_mib, device.processes) = (Some(*mib), Some(vec![process]));
                device.healthy = mib % 5 != 0;
            }
            number += 1;
        }
        let body = serde_json::to_vec(&report).unwrap();
        let (status, answer) = reports::answer(&app, &node.name, &body);
        assert!(status.is_success(), "{}", String::from_utf8_lossy(&answer));
    }
    (app, api)
}

// --- pods ----------------------------------------------------------------------------------------

/// A request in the keys that users write.
fn keys(chance: &mut ChaCha8Rng) -> (Value, Value) {
    let mut one = |all: &[&str]| (*all.choose(chance).unwrap()).to_owned();
    let share = one(&["0.1", "0.25", "0.33333", "0.5", "0.7", "1", "0.00001"]);
    let memory = one(&["1000", "4096", "7000", "16384", "40000"]);
    let profile = one(&["1g.5gb", "2g.10gb", "3g.20gb", "1g.5gb.me", "7g.40gb"]);
    let count = one(&["1", "1", "1", "2", "3"]);
    let (mut annotations, mut limits) = (json!({}), json!({}));
    match chance.random_range(0..12) {
        0..=3 => annotations["gpu-fraction"] = share.clone().into(),
        4..=6 => annotations["gpu-memory"] = memory.clone().into(),
        7 | 8 => {
            annotations["gpu-fraction"] = share.clone().into();
            annotations["gpu-memory"] = memory.clone().into();
        }
        9 => limits["nvidia.com/gpu"] = count.clone().into(),
        10 => limits[format!("nvidia.com/mig-{profile}")] = count.clone().into(),
        _ => limits["nvidia.com/gpu.shared"] = "1".into(),
    }
    if limits == json!({}) && chance.random_bool(0.2) {
        annotations["gpu-fraction-num-devices"] = count.into();
    }
    if annotations.get("gpu-fraction").is_some() && chance.random_bool(0.2) {
        annotations["gpu-fraction.limit"] = "1".into();
    } else if annotations.get("gpu-memory").is_some() && chance.random_bool(0.2) {
        annotations["gpu-memory.limit"] = "48Gi".into();
    }
    for (key, values, part) in [
        ("gpupack.dev/gpu-model", &["A100|H100", "T4", "MIG 3g.20gb", "L4|T4"][..], 0.2),
        ("gpupack.dev/isolation", &["memory", "memory", "hardware"], 0.3),
        ("gpupack.dev/policy", &["spread", "binpack", "fragmentation"], 0.15),
    ] {
        if chance.random_bool(part) {
            annotations[key] = (*values.choose(chance).unwrap()).into();
        }
    }
    (annotations, limits)
}

fn pod(chance: &mut ChaCha8Rng, number: usize) -> DemoPod {
    let (annotations, limits) = keys(chance);
    let name = format!("p-{number:04}");
    let cpu = format!("{}m", 50 * chance.random_range(0..40));
    let memory = format!("{}Mi", 100 * chance.random_range(0..80));
    let requests = json!({"cpu": cpu, "memory": memory});
    let json = json!({
        "metadata": {"name": name, "namespace": "batch", "uid": name, "annotations": annotations},
        "spec": {"schedulerName": "gpupack", "priority": chance.random_range(-1..=1),
            "containers": [{"name": "main",
                "resources": {"requests": requests, "limits": limits}}]},
    });
    DemoPod { uid: name.clone(), namespace: "batch", name, json: json.to_string() }
}

// --- the three -----------------------------------------------------------------------------------

/// Places of devices on the nodes of a fleet, by UUID.
type Map = BTreeMap<DeviceId, DeviceAt>;

fn state_of(app: &App) -> State {
    serde_json::from_slice(&state_view::state(app, &Viewer::All)).unwrap()
}

fn map(state: &State) -> Map {
    let places = state.nodes.iter().flat_map(places);
    places.map(|(at, device)| (DeviceId::new(&device.id).unwrap(), at)).collect()
}

fn placed(app: &App, uid: &str, map: &Map) -> Option<Placed> {
    let uid = PodUid::new(uid);
    let nodes = app.ledger.nodes();
    let node = nodes.iter().find(|node| node.has_pod(&uid))?;
    let devices = node.reservation(&uid).map(|held| held.placement.devices.clone());
    let devices = devices.unwrap_or_default();
    let devices = devices.iter().map(|placed| (map[&placed.id], placed.demand)).collect();
    Some((node.name().to_string(), devices))
}

/// What is free on each device: node, device, MiB, millionths.
fn free(state: &State) -> Vec<String> {
    let mut rows = Vec::new();
    for node in &state.nodes {
        for (at, device) in places(node) {
            let free = &device.free;
            if device.kind != DeviceKind::MigParent {
                rows.push(format!("{} {at} {free:?}", node.name));
            }
        }
    }
    rows.sort();
    rows
}

fn free_in(rooms: &[sim::run::cluster::FreeOnDevice]) -> Vec<String> {
    let mut rows: Vec<String> = rooms
        .iter()
        .map(|room| {
            let free = wire::api::state::DeviceAmount {
                memory_mib: room.free.memory.mib(),
                share_millionths: room.free.share.millionths(),
            };
            format!("{} {} {free:?}", room.node, room.device)
        })
        .collect();
    rows.sort();
    rows
}

/// A trace through its files.
fn through_files(snapshot: &Snapshot) -> (Vec<TraceNode>, Vec<TracePod>) {
    let nodes = parse_nodes("n", snapshot.nodes_csv().unwrap().as_slice()).unwrap();
    let pods = parse_pods("p", snapshot.pods_csv().unwrap().as_slice()).unwrap();
    assert_eq!((&nodes, &pods), (&snapshot.nodes, &snapshot.pods), "read as written");
    (nodes, pods)
}

fn end(drive: &mut Drive, uid: &str) {
    drive.scheduler.forget(uid);
    drive.api.delete(&PodUid::new(uid));
    // No report shows a process of it: after the limit its devices are free.
    let app = &drive.app;
    app.ledger.tick(app.clock.now().plus(app.ledger.settings.drain_limit * 2));
}

struct World {
    fleet: Fleet,
    /// The pods, those that any scheduler would try.
    pods: Vec<DemoPod>,
    policy: Policy,
    /// Devices with memory in use by processes outside of all pods; some of them are unhealthy.
    others: Vec<(usize, u64)>,
}

fn world(chance: &mut ChaCha8Rng) -> World {
    let nodes = (0..chance.random_range(1..=6)).map(|number| node(chance, number)).collect();
    let fleet =
        Fleet { process_linger_ms: 0, use_percent: 60, use_percent_of: BTreeMap::new(), nodes };
    fleet.check().unwrap();
    let others = (0..6).map(|at| (3 * at, chance.random_range(0..900))).collect();
    let pods = (0..PODS).map(|number| pod(chance, number));
    let is_sound = |pod: &DemoPod| SeenPod::from_json(&pod.json).unwrap().request.is_ok();
    let pods = pods.filter(is_sound).collect();
    World { fleet, pods, policy: *Policy::ALL.choose(chance).unwrap(), others }
}

async fn check(seed: u64) -> (usize, usize) {
    let mut chance = ChaCha8Rng::seed_from_u64(seed);
    let world = world(&mut chance);
    let names: Vec<String> = world.fleet.nodes.iter().map(|node| node.name.clone()).collect();
    let names_only: Vec<&str> = names.iter().map(String::as_str).collect();
    let (over_http, its_api) = extender(&world.fleet, world.policy, &world.others).await;
    let (direct, api) = extender(&world.fleet, world.policy, &world.others).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let (_stop, stopped) = watch::channel(false);
    let service = Service::new(Arc::clone(&over_http), Arc::new(|_: &str| Ok(())));
    let serving = tokio::spawn(serve(service.clone(), router(service), listener, stopped.clone()));
    let drive = |app: &Arc<App>, api: ApiServer| {
        let scheduler = Scheduler::new(base.clone(), &world.fleet.nodes, seed);
        let figures = watch::Sender::new(DemoFigures::default());
        Drive::new(Arc::clone(app), api, figures, scheduler, seed, stopped.clone())
    };
    let (mut caller, mut demo) = (drive(&over_http, its_api), drive(&direct, api));

    // The simulator gets all through files.
    let (nodes, _) = cluster(&state_of(&over_http));
    let requests = world.pods.iter().map(|pod| {
        let seen = SeenPod::from_json(&pod.json).unwrap();
        let query = over_http.query(&seen).unwrap();
        let (name, node) = (pod.name.clone(), Some(names[0].clone()));
        let gpu = query.gpu;
        ClusterPod { name, node, host: query.host, gpu, ..ClusterPod::default() }
    });
    let snapshot = Snapshot::of(nodes, requests.collect(), RowNames::Kept);
    let (trace_nodes, trace_pods) = through_files(&snapshot);
    let mut policies = SimPolicy::ALL.into_iter();
    let policy = policies.find(|policy| policy.name == world.policy.name()).unwrap();
    let mut simulator = SimCluster::new(&trace_nodes, &trace_pods, policy, 1, 0).unwrap();

    let map = map(&state_of(&over_http));
    let mut running: Vec<(usize, Seat)> = Vec::new();
    let (mut count, mut on_several) = (0, 0);
    for (arrival, pod) in world.pods.iter().enumerate() {
        if running.len() > 4 && chance.random_bool(0.3) {
            let (ended, seat) = running.swap_remove(chance.random_range(0..running.len()));
            end(&mut caller, &world.pods[ended].uid);
            end(&mut demo, &world.pods[ended].uid);
            simulator.end(ended, seat);
        }
        let seen = SeenPod::from_json(&pod.json).unwrap();
        caller.arrive(pod.clone()).await.unwrap();
        direct.ledger.learn(seen.pod.uid.clone(), &direct.query(&seen).unwrap());
        demo.allocate(pod, &names_only).unwrap();
        simulator.meet(arrival, &trace_pods[arrival]);
        let seat = simulator.place(arrival, &trace_pods[arrival]);
        let by_verbs = placed(&over_http, &pod.uid, &map);
        let by_demo = placed(&direct, &pod.uid, &map);
        let by_simulator = seat.and_then(|seat| simulator.placement(arrival, seat));
        let by_simulator = by_simulator.map(|placed| (placed.node, placed.devices));
        let told = || format!("seed {seed}, {}: {}", world.policy, pod.json);
        assert_eq!(by_verbs, by_demo, "the verbs, and the demo: {}", told());
        assert_eq!(by_verbs, by_simulator, "the verbs, and the simulator: {}", told());
        running.extend(seat.map(|seat| (arrival, seat)));
        count += usize::from(by_verbs.is_some());
        on_several += usize::from(by_verbs.is_some_and(|(_, devices)| devices.len() > 1));
    }
    let state = state_of(&over_http);
    assert_eq!(free(&state), free_in(&simulator.free()), "seed {seed}");
    let (nodes, pods) = cluster(&state);
    let (nodes, mut pods) = through_files(&Snapshot::of(nodes, pods, RowNames::Kept));
    pods.retain(|pod| pod.placed().is_some());
    keep_placements(&nodes, &mut pods).unwrap();
    let kept = end_of(&nodes, &pods, policy, 1).unwrap();
    assert_eq!(free(&state), free_in(&kept.free), "a snapshot that is read back, seed {seed}");
    serving.abort();
    (count, on_several)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_verbs_the_demo_and_the_simulator_place_the_same_pods_alike() {
    let (mut placed, mut on_several) = (0, 0);
    for seed in 0..SEEDS {
        let (count, several) = check(seed).await;
        placed += count;
        on_several += several;
    }
    let mut text = String::new();
    let _ = write!(text, "{placed} pods placed, {on_several} of them on several devices");
    assert!(placed > 300 && on_several > 12, "too few for a result: {text}");
}

#[tokio::test]
async fn a_pod_that_gpupack_evicts_ends_once() {
    let fleet = Fleet::mixed(1, 2, 1);
    let (app, api) = extender(&fleet, Policy::ALL[0], &[]).await;
    let (_stop, stopped) = watch::channel(false);
    let node = &fleet.nodes[0];
    let (scheduler, figures) =
        (Scheduler::new(String::new(), &fleet.nodes, 1), watch::Sender::default());
    let mut drive = Drive::new(app, api.clone(), figures, scheduler, 1, stopped);
    let pod = drive.next_pod(Draw::Sound);
    assert!(drive.allocate(&pod, &[node.name.as_str()]).unwrap());
    drive.start_ending(Duration::from_secs(1));
    let path = format!("/api/v1/namespaces/{}/pods/{}/eviction", pod.namespace, pod.name);
    let eviction = hyper::Request::post(path).body(b"{}".to_vec()).unwrap();
    assert_eq!(api.answer(&eviction).0, 201);
    assert!(!drive.scheduler.has_room(&node.name, node.host()));
    for now in [Duration::ZERO, Duration::MAX] {
        drive.end_due(now);
        assert_eq!(drive.figures.borrow().pods.ended, 1);
        assert!(drive.scheduler.has_room(&node.name, node.host()));
    }
}

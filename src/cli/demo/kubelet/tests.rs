use std::collections::BTreeSet;

use hyper::Request;
use serde_json::Value;

use super::*;
use crate::demo::pods::{DemoPod, lending};
use crate::serve::extender::settings;
use crate::simulated::fleet::Fleet;
use agent::gpu::sample::{Probe, ProcessSampling};
use agent::node::session::{ExtenderAnswer, Session};
use control::bind::recall::recall;
use control::bind::take_back::take_back;
use engine::hardware::pool::PoolRules;
use engine::ledger::nodes::state::Ledger;
use kube_api::config::file::Config;
use kube_api::pod::watch::PodWatch;
use kube_api::request::placement::encode;
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::outside::{Action, ApiAnswer, StepEvent};
use server::api::reports;
use wire::ids::PoolName;
use wire::report::bodies::{AllocationState, Reply};
use wire::units::MemMib;

/// A node with two GPUs of 1,000 MiB, its agent and kubelet.
struct Bed {
    app: Arc<App>,
    api: ApiServer,
    kubelet: Kubelet,
    probe: ProgramProbe,
    session: Session,
    time: &'static SimulatedTime,
    draining: BTreeSet<String>,
}

const FLEET: &str = r#"{"nodes":[{"name":"n","cpu_milli":100000,"memory_mib":100000,"gpus":[
    {"uuid":"GPU-a","model":"M","memory_mib":1000},{"uuid":"GPU-b","model":"M","memory_mib":1000}]}]}"#;

fn bed() -> Bed {
    let fleet = Fleet::from_json(FLEET).unwrap();
    let time: &SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(1_700_000_000)));
    let clock = Clock::simulated(time);
    let config = Config { pools: lending(&PoolRules::default()), ..Config::default() };
    let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
    ledger.share_by(config.pools.clone());
    let (app, api) = (Arc::new(App::alone(ledger, config, clock)), ApiServer::default());
    api.show_to(PodWatch::new(Arc::clone(&app.ledger), app.clone(), clock));
    let node = &fleet.nodes[0];
    app.ledger.see_node(&node.node_name(), node.host(), PoolName::new(""));
    app.ledger.set_listed(app.clock.now());
    app.lead.set_fenced();
    let programs = Arc::new(Programs::new(&fleet));
    let kubelet = Kubelet::new(Arc::clone(&app), api.clone(), programs);
    let probe = kubelet.probe(node);
    let mut bed = Bed {
        app,
        api,
        kubelet,
        probe,
        session: Session::new("agent", 0),
        time,
        draining: BTreeSet::new(),
    };
    bed.report();
    bed
}

fn pod(name: &str, annotations: &str, resources: &str) -> DemoPod {
    let json = format!(
        r#"{{"metadata":{{"name":"{name}","namespace":"d","uid":"{name}","annotations":{{{annotations}}}}},
        "spec":{{"containers":[{{"name":"main","resources":{{"requests":{{"cpu":"10m"{resources}}}}},
        "resizePolicy":[{{"resourceName":"cpu","restartPolicy":"RestartContainer"}}]}}]}}}}"#
    );
    DemoPod { uid: name.to_owned(), namespace: "d", name: name.to_owned(), json }
}

fn notebook(name: &str, fraction: &str) -> DemoPod {
    let keys = r#""gpu-fraction.limit":"1","gpupack.dev/movable":"restart""#;
    pod(name, &format!(r#""gpu-fraction":"{fraction}",{keys}"#), "")
}

impl Bed {
    fn report(&mut self) {
        let now = self.app.clock.now();
        let mut sample = self.probe.sample(ProcessSampling::List, now).unwrap();
        sample.draining.clone_from(&self.draining);
        let report = serde_json::to_vec(&self.session.report(&sample)).unwrap();
        let (status, body) = reports::answer(&self.app, "n", &report);
        assert!(status.is_success(), "{}", String::from_utf8_lossy(&body));
        let reply: Reply = serde_json::from_slice(&body).unwrap();
        if let Some(allocations) = &reply.allocations {
            let all = allocations
                .iter()
                .filter(|allocation| allocation.state == AllocationState::Draining);
            self.draining = all.map(|allocation| allocation.pod_uid.clone()).collect();
        }
        self.session.settle(&ExtenderAnswer::Reply(reply));
    }

    /// Tenths of a second go by, with a look of the kubelet and a report in each.
    fn tenths(&mut self, count: u32) {
        for _ in 0..count {
            self.time.set(self.app.clock.now().plus(Duration::from_millis(100)));
            self.step();
            self.kubelet.look(self.app.clock.now());
            self.report();
        }
    }

    /// Carries out what gpupack wants, until it wants nothing more now.
    fn step(&self) {
        let (outside, now) = (&self.app.outside, self.app.clock.now());
        let mut actions = outside.step(StepEvent::Changed, now);
        while let Some(action) = actions.pop() {
            let event = match action {
                Action::Work(work) => {
                    work();
                    StepEvent::Changed
                }
                Action::Call { id, request, .. } => {
                    let (status, body) = self.api.answer(&request);
                    let body = Some(body.into_bytes());
                    StepEvent::Answered { id, answer: Ok(ApiAnswer { status, body, date: None }) }
                }
            };
            actions.extend(outside.step(event, now));
        }
    }

    /// The first half of a bind.
    fn reserve(&self, pod: &DemoPod) {
        self.api.put(serde_json::from_str(&pod.json).unwrap());
        let seen = SeenPod::from_json(&pod.json).unwrap();
        let query = self.app.query(&seen).unwrap();
        self.app.ledger.reserve(&seen.pod, "n", &query, self.app.clock.now()).unwrap();
        recall(&self.app, Some("n"));
        take_back(&self.app, Some("n"));
    }

    fn waits_for(&self, pod: &DemoPod) -> Vec<String> {
        let to_post = self.app.ledger.to_post(&PodUid::new(pod.uid.as_str())).unwrap();
        to_post.waits_for.iter().map(ToString::to_string).collect()
    }

    /// The second half of a bind that waits for no pod.
    fn post(&mut self, pod: &DemoPod) {
        assert_eq!(self.waits_for(pod), Vec::<String>::new());
        let uid = PodUid::new(pod.uid.as_str());
        let annotations = encode(&self.app.ledger.to_post(&uid).unwrap().placement).unwrap();
        let binding: Value =
            json!({"metadata": {"annotations": annotations}, "target": {"name": "n"}});
        let request = Request::post(format!("/api/v1/namespaces/d/pods/{}/binding", pod.name));
        let request = request.body(binding.to_string().into_bytes()).unwrap();
        assert_eq!(self.api.answer(&request).0, 201);
        self.app.ledger.confirm(&uid);
        self.kubelet.start(&uid, self.app.clock.now());
        self.report();
    }

    /// `device pid pod` of each process that runs.
    fn running(&mut self) -> Vec<String> {
        let now = self.app.clock.now();
        let sample = self.probe.sample(ProcessSampling::List, now).unwrap();
        let all = sample.uses.into_iter().flat_map(|device| {
            device.processes.unwrap_or_default().into_iter().map(move |process| {
                format!("{} {} {}", device.uuid, process.pid, process.pod_uid.unwrap_or_default())
            })
        });
        all.collect()
    }
}

#[test]
fn a_guest_goes_home_within_a_second_and_then_the_other_pod_starts() {
    let mut bed = bed();
    let (one, two) = (notebook("one", "0.5"), notebook("two", "0.5"));
    for pod in [&one, &two] {
        bed.reserve(pod);
        bed.post(pod);
    }
    assert_eq!(bed.running(), ["GPU-a 1000 one", "GPU-b 1001 two"], "two is a guest");
    let train = pod("train", "", r#"},"limits":{"nvidia.com/gpu":"1""#);
    bed.reserve(&train);
    assert_eq!(bed.waits_for(&train), ["two"]);
    bed.tenths(9);
    assert_eq!(bed.waits_for(&train), ["two"], "its container has not ended yet");
    assert_eq!(bed.running(), ["GPU-a 1000 one", "GPU-b 1001 two"]);
    bed.tenths(3);
    assert_eq!(bed.running(), ["GPU-a 1000 one", "GPU-a 1002 two"], "a new process at home");
    bed.tenths(2);
    bed.post(&train);
    bed.tenths(2);
    let counts = DemoBorrowing { bursts: 0, bursts_refused: 0, ..bed.kubelet.counts() };
    assert_eq!(counts, DemoBorrowing { recalls: 1, ..DemoBorrowing::default() });
    assert_eq!(bed.kubelet.crowded(), 0);
    assert_eq!(bed.app.ledger.audit(), Ok(()));
    let uid = PodUid::new("two");
    bed.kubelet.end(&uid, bed.app.clock.now());
    bed.api.delete(&uid);
    assert_eq!(bed.running(), ["GPU-a 1000 one", "GPU-b 1003 train"]);
}

#[test]
fn a_guest_whose_room_is_free_again_stays() {
    let mut bed = bed();
    let (one, two) = (notebook("one", "0.5"), notebook("two", "0.5"));
    for pod in [&one, &two] {
        bed.reserve(pod);
        bed.post(pod);
    }
    let train = pod("train", "", r#"},"limits":{"nvidia.com/gpu":"1""#);
    bed.reserve(&train);
    bed.app.ledger.forget(&PodUid::new("train"));
    bed.tenths(20);
    assert_eq!(bed.running(), ["GPU-a 1000 one", "GPU-b 1001 two"]);
    assert_eq!(bed.kubelet.counts().recalls, 0);
}

#[test]
fn memory_above_the_request_is_taken_back_by_a_restart_in_place() {
    let mut bed = bed();
    let one = notebook("one", "0.25");
    bed.reserve(&one);
    bed.post(&one);
    let filler = pod("filler", r#""gpu-fraction":"1""#, "");
    bed.reserve(&filler);
    bed.post(&filler);
    let is_bursting = |bed: &Bed| bed.app.ledger.lent().memory > MemMib::new(700);
    let mut waited = 0;
    while !is_bursting(&bed) {
        bed.tenths(1);
        waited += 1;
        assert!(waited < 10_000, "it uses all memory of its GPU now and then");
    }
    let two = pod("two", r#""gpu-fraction":"0.75""#, "");
    bed.reserve(&two);
    assert_eq!(bed.waits_for(&two), ["one"]);
    bed.tenths(12);
    bed.post(&two);
    bed.tenths(15);
    assert_eq!(bed.kubelet.counts().take_backs, 1);
    assert_eq!(bed.running(), ["GPU-a 1002 one", "GPU-a 1003 two", "GPU-b 1001 filler"]);
    assert_eq!((bed.kubelet.crowded(), bed.app.ledger.audit()), (0, Ok(())));
}

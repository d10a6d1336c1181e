//! Calls of kube-scheduler and of other clients, and what becomes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use control::bind::binding;
use rand::Rng;
use runtime::step::outside::StepEvent;
use serde_json::{Value, json};
use server::scheduler::{preempt, verbs};

use super::faults::Fault;
use super::scheduler::Scheduler;
use super::teams::TEAMS;
use super::{Caller, QUIET_FOR, Verb, What, World};

/// kube-scheduler's timeout of a call.
pub(super) const HTTP_TIMEOUT: u64 = 10_000;

/// How long a call of another client may hide that a pod was refused: until its answer is doubted.
const HIDDEN_FOR: u64 = 12_000;

/// A call of *filter* or *prioritize* for a pod.
fn filter_body(pod: &str, nodes: &[impl serde::Serialize]) -> String {
    format!(r#"{{"NodeNames":{},"Nodes":null,"Pod":{pod}}}"#, json!(nodes))
}

/// The nodes that a call names.
fn named_nodes(body: &str) -> BTreeSet<String> {
    let mut call: Value = serde_json::from_str(body).expect("JSON");
    serde_json::from_value(call["NodeNames"].take()).expect("names")
}

impl World {
    /// Lets a kube-scheduler go on after this time, or earlier.
    pub(super) fn plan_schedule(&mut self, by: usize, time: u64) {
        let due = self.now + time;
        if self.schedulers[by].next.is_none_or(|next| due < next || next < self.now) {
            self.schedulers[by].next = Some(due);
            self.after(time, What::Schedule { by });
        }
    }

    /// A kube-scheduler ends. It forgets what it decided, and is back after this time.
    pub(super) fn restart_scheduler(&mut self, by: usize, time: u64) {
        self.schedulers[by] = Scheduler::new(self.schedulers[by].name);
        let time = time.min(self.settings.faults_for + QUIET_FOR / 2 - self.now);
        self.schedulers[by].away_until = self.now + time + 1;
        self.after(time + 1, What::Schedule { by });
    }

    pub(super) fn schedule(&mut self, by: usize) {
        if self.now < self.schedulers[by].away_until {
            return;
        }
        self.schedulers[by].away_until = 0;
        let (now, number) = (self.now, self.cycles + 1);
        let is_cut = now < self.outage_until && self.is_faulty();
        let scheduler = &mut self.schedulers[by];
        scheduler.next = scheduler.next.filter(|next| *next > now);
        if !is_cut {
            let seen = std::mem::replace(&mut scheduler.seen, self.api.log.len());
            self.api.log[seen..].iter().for_each(|change| scheduler.see(change, now));
        }
        if scheduler.begin(now, number) {
            self.cycles = number;
            let named = scheduler.feasible(&self.nodes);
            match named.is_empty() {
                true => self.refused(by),
                false => self.call(by, Verb::Filter, &named),
            }
        }
        if let Some(due) = self.schedulers[by].due(now) {
            let time = self.rng.random_range(5..30);
            self.plan_schedule(by, due.saturating_sub(now) + time);
        }
    }

    fn call(&mut self, by: usize, verb: Verb, nodes: &[String]) {
        let Some(cycle) = &self.schedulers[by].cycle else { return };
        let caller = Caller { by: Some(by), cycle: cycle.number, uid: cycle.uid.clone() };
        let body = filter_body(&self.api.change(&cycle.pod).text, nodes);
        let (life, way) = (self.serving_life(), self.rng.random_range(0..3));
        self.after(way, What::Verb { life, caller: caller.clone(), verb, body });
        self.after(HTTP_TIMEOUT, What::Verbed { caller, verb, answer: None });
    }

    pub(super) fn verb(&mut self, life: u64, caller: Caller, verb: Verb, body: &str) {
        let way = self.rng.random_range(0..3);
        let now = self.now;
        let open_on = self.open_on(life, &caller.uid).map(str::to_owned);
        let replica = self.process_mut(life).inspect(|it| it.set_time(now));
        let Some(replica) = replica.filter(|it| it.app.leads()) else {
            return self.after(way, What::Verbed { caller, verb, answer: None });
        };
        let answer = match verb {
            Verb::Filter => verbs::filter(&replica.app, body.as_bytes()),
            Verb::Prioritize => verbs::prioritize(&replica.app, body.as_bytes()),
        };
        let (answer, _) = answer.expect("a good body");
        let answer: Value = serde_json::from_slice(&answer).expect("JSON");
        let is_late = !replica.may_write();
        let mut broken =
            is_late.then(|| format!("{} is answered after the end of the term", caller.uid));
        if let Some(names) = answer["NodeNames"].as_array() {
            let names = names.iter().filter_map(Value::as_str).map(str::to_owned);
            let names: BTreeSet<String> = names.collect();
            // The pod's own annotations may name other nodes.
            let named = named_nodes(body);
            let is_kept = |node: &String| !named.contains(node) || names.contains(node);
            if open_on.is_some_and(|node| verb == Verb::Filter && !is_kept(&node)) {
                let refused = format!("{} is refused where its Binding may arrive", caller.uid);
                broken = broken.or(Some(refused));
            }
            replica.named.insert(caller.uid.clone(), named);
            replica.passed.entry(caller.uid.clone()).or_default().extend(names.iter().cloned());
            if body.contains("\"gpu-") || body.contains("nvidia.com/mig-") {
                broken = broken.or(self.check_passed(life, &caller.uid, &names).err());
            }
        }
        broken.into_iter().for_each(|broken| self.broke(broken));
        if !self.hits(Fault::GiveUp, 2) {
            self.after(way, What::Verbed { caller, verb, answer: Some(answer) });
        }
        self.step(life, StepEvent::Changed);
    }

    pub(super) fn verbed(&mut self, caller: &Caller, verb: Verb, answer: Option<Value>) {
        let Some(by) = caller.by else { return };
        if self.schedulers[by].current(caller.cycle).is_none() {
            return;
        }
        self.plan_schedule(by, 10);
        let names: Vec<String> = match (verb, answer) {
            (_, None) => return self.schedulers[by].fail(self.now),
            (Verb::Filter, Some(answer))
                if !answer["Error"].as_str().unwrap_or_default().is_empty() =>
            {
                return self.schedulers[by].fail(self.now);
            }
            (Verb::Filter, Some(answer)) => {
                serde_json::from_value(answer["NodeNames"].clone()).unwrap_or_default()
            }
            (Verb::Prioritize, Some(answer)) => {
                let best = answer.as_array().into_iter().flatten();
                let best = best.max_by_key(|score| score["Score"].as_i64());
                best.and_then(|best| best["Host"].as_str()).map(str::to_owned).into_iter().collect()
            }
        };
        match &names[..] {
            [] => self.refused(by),
            _ if self.hits(Fault::GiveUp, 2) => self.schedulers[by].fail(self.now),
            [node] => self.call_bind(by, caller, node),
            _ => self.call(by, Verb::Prioritize, &names),
        }
    }

    /// No node fits the pod of this cycle: it is parked, and may preempt others.
    fn refused(&mut self, by: usize) {
        if self.hits(Fault::Preemption, 40) {
            self.preempt(by);
        }
        self.schedulers[by].park(self.now);
        self.plan_schedule(by, 10);
    }

    fn preempt(&mut self, by: usize) {
        let plan = self.schedulers[by].victims(&self.nodes);
        let Some(cycle) = self.schedulers[by].cycle.as_ref().filter(|_| !plan.is_empty()) else {
            return;
        };
        let meta = |uids: &Vec<String>| {
            let pods: Vec<Value> = uids.iter().map(|uid| json!({"UID": uid})).collect();
            json!({"Pods": pods, "NumPDBViolations": 0})
        };
        let victims: BTreeMap<&String, Value> =
            plan.iter().map(|(node, uids)| (node, meta(uids))).collect();
        let victims = json!(victims);
        let pod = &self.api.change(&cycle.pod).text;
        let body = format!(
            r#"{{"NodeNameToMetaVictims":{victims},"NodeNameToVictims":null,"Pod":{pod}}}"#
        );
        let (uid, wants_gpu) = (cycle.uid.clone(), cycle.pod.wants_gpu());
        let serving = self.process(self.serving_life()).filter(|replica| !replica.is_frozen);
        let Some(replica) = serving else { return };
        let (answer, _) = preempt::preempt(&replica.app, body.as_bytes()).expect("a good body");
        let answer: Value = serde_json::from_slice(&answer).expect("JSON");
        let chosen =
            answer["NodeNameToMetaVictims"].as_object().and_then(|nodes| nodes.iter().next());
        let Some((_, chosen)) = chosen else { return };
        if wants_gpu {
            self.broke(format!("{chosen} are evicted for {uid}, which requests a GPU"));
        }
        for victim in chosen["Pods"].as_array().into_iter().flatten() {
            self.api.delete(victim["UID"].as_str().unwrap_or_default());
        }
    }

    fn call_bind(&mut self, by: usize, caller: &Caller, node: &str) {
        if !self.schedulers[by].assume(node) {
            return;
        }
        let (caller, node) = (caller.clone(), node.to_owned());
        if self.hits(Fault::SlowPlugin, 10) {
            let time = self.rng.random_range(0..8_000);
            return self.after(time, What::Plugged { caller, node });
        }
        self.plugged(caller, &node);
    }

    /// The pod is bound unless kube-scheduler no longer knows it.
    pub(super) fn plugged(&mut self, caller: Caller, node: &str) {
        let Some(scheduler) = caller.by.map(|by| &self.schedulers[by]) else { return };
        if scheduler.binding.get(&caller.uid) != Some(&caller.cycle) {
            return;
        }
        self.after(HTTP_TIMEOUT, What::Bound { caller: caller.clone(), error: None });
        self.send_bind(caller, node);
    }

    pub(super) fn send_bind(&mut self, caller: Caller, node: &str) {
        let uid = &caller.uid;
        let of = self.api.pods.get(uid).map(|pod| &pod.of);
        let (team, name) = of.map_or((TEAMS[0], uid), |of| (of.team, &of.name));
        let body = json!({"PodName": name, "PodNamespace": team, "PodUID": uid, "Node": node});
        let (life, way, body) =
            (self.serving_life(), self.rng.random_range(0..3), body.to_string());
        self.after(way, What::Bind { life, caller, body });
    }

    pub(super) fn bind(&mut self, life: u64, caller: Caller, body: String) {
        let now = self.now;
        let answered = Arc::clone(&self.answered);
        let replica = self.process_mut(life).inspect(|it| it.set_time(now));
        let Some(replica) = replica.filter(|it| it.app.leads()) else {
            return self.after(1, What::Bound { caller, error: None });
        };
        replica.calls.insert(caller.uid.clone(), now);
        replica.open_calls.entry(caller.uid.clone()).or_default().insert(now);
        replica.under_way += 1;
        if replica.passed.get(&caller.uid).is_none_or(BTreeSet::is_empty) {
            replica.unfiltered.insert(caller.uid.clone());
        }
        let app = Arc::clone(&replica.app);
        replica.app.outside.spawn(async move {
            let (answer, _) = binding::bind(&app, body.as_bytes()).await.expect("a good body");
            let answer: Value = serde_json::from_slice(&answer).expect("JSON");
            let error = answer["Error"].as_str().unwrap_or_default().to_owned();
            answered.lock().expect("no panic").push((caller, now, error));
        });
        self.step(life, StepEvent::Changed);
    }

    pub(super) fn bound(&mut self, caller: &Caller, error: Option<String>) {
        let Some(by) = caller.by else { return };
        let now = self.now;
        let scheduler = &mut self.schedulers[by];
        if scheduler.binding.get(&caller.uid) != Some(&caller.cycle) {
            return;
        }
        if error.as_deref() == Some("") {
            scheduler.binding.remove(&caller.uid);
        } else {
            scheduler.try_again(&caller.uid, now);
            self.plan_schedule(by, 10);
        }
    }

    // --- other clients ---------------------------------------------------------------------------

    /// A client that tries where a pod would fit, again and again.
    pub(super) fn trial(&mut self, uid: String, left: u32) {
        let pod = match self.api.pods.get(&uid) {
            Some(pod) if pod.node.is_none() => self.api.change(pod).text.clone(),
            None if uid.starts_with("made-up") => {
                let annotations = json!({"gpu-fraction": "0.25"});
                json!({"metadata": {"uid": uid, "namespace": TEAMS[0], "name": uid,
                    "resourceVersion": "1", "annotations": annotations},
                    "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]}})
                .to_string()
            }
            _ => return,
        };
        let names: Vec<&String> = self.nodes.iter().map(|node| &node.name).collect();
        let body = filter_body(&pod, &names);
        let life = self.serving_life();
        self.tried_until.insert(uid.clone(), self.now + HIDDEN_FOR);
        for (time, verb) in [(1, Verb::Filter), (5, Verb::Prioritize)] {
            let caller = Caller { by: None, cycle: 0, uid: uid.clone() };
            self.after(time, What::Verb { life, caller, verb, body: body.clone() });
        }
        if left > 0 && self.is_faulty() {
            let time = self.rng.random_range(200..1_500);
            self.after(time, What::Trial { uid, left: left - 1 });
        }
    }
}

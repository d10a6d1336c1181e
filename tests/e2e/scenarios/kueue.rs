//! GPU pods and Jobs under the real Kueue, with the objects of `docs/kueue.md`: what Kueue reserves is what they
//! count, in each phase.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube_api::request::quantity::parse_count;
use serde_json::{Value, json};

use crate::binaries::{self, KueueProgram};
use crate::clock;
use crate::cluster::Cluster;
use crate::control_plane::{ControlPlane, Identity};
use crate::fleet::{A10, A100, Fleet};
use crate::kueue::{Kueue, namespace, of_page, put};
use crate::leash::Leash;
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, Testbed, scenario_with};
use crate::watching::{Pods, Seen, find, is_bound};
use crate::webhook::Webhook;

/// Set to run it.
const WANTED: &str = "GPUPACK_E2E_KUEUE";

/// Set where it is a failure that it cannot run.
const REQUIRED: &str = "GPUPACK_KUEUE_REQUIRED";

const LIMIT: Duration = Duration::from_secs(60);

/// What a whole GPU counts: share, memory, devices.
const WHOLE: [u64; 3] = [1_000_000, 81_920, 1];

const MARKERS: [&str; 3] = ["gpupack.dev/gpu-share", "gpupack.dev/gpu-memory", "gpupack.dev/gpus"];

/// The gate of pods that wait for quota.
const GATE: &str = "kueue.x-k8s.io/admission";

/// The label by which nodes say their model.
const MODEL: &str = "nvidia.com/gpu.product";

struct Programs {
    kueue: KueueProgram,
    controllers: PathBuf,
}

#[test]
fn kueue_reserves_what_gpu_pods_count() {
    scenario_with("kueue", REQUIRED, prepare, |bed, programs| async move {
        let play = Play::start(bed, &programs).await;
        play.plain_pods().await;
        play.borrowed_and_reclaimed().await;
        play.a_group().await;
        play.a_job().await;
        play.sets_of_jobs_and_workers().await;
        play.flavors().await;
        play.weights().await;
        play.a_marker_that_is_not_covered().await;
        play.a_job_that_was_not_completed().await;
        play.stage.figure(&format!(
            "{} times some quota was reserved, and it was what the pods count, in all markers",
            play.compared.get()
        ));
        play.stage.judge().await;
    });
}

fn prepare(_: &ControlPlane) -> Result<Programs, String> {
    let is_set = |name| clock::variable(name).is_some_and(|value| value != "0");
    if !is_set(WANTED) && !is_set(REQUIRED) {
        return Err(format!("{WANTED} is not set: it builds Kueue, which takes minutes"));
    }
    Ok(Programs { kueue: binaries::kueue()?, controllers: binaries::controllers()? })
}

/// Times an amount.
fn times(count: u64, amounts: [u64; 3]) -> [u64; 3] {
    amounts.map(|amount| count * amount)
}

struct Play {
    stage: Stage,
    team_a: Cluster,
    team_b: Cluster,
    compared: Cell<usize>,
    _running: (Kueue, Leash, Webhook),
}

impl Play {
    /// A control plane for itself: Kueue's webhooks see the pods of all namespaces.
    async fn start(bed: Testbed, programs: &Programs) -> Self {
        // It ends with this process, like the one that all scenarios share.
        let plane: &ControlPlane = Box::leak(Box::new(bed.plane.start_beside("kueue").await));
        let admin = plane.client(Identity::Admin).await;
        manifests::apply(&admin, "rbac.yaml", Mode::Keep).await;
        let cluster = Cluster::fresh(admin.clone(), "kueue").await;
        let quota = json!({"required": true, "reference_memory_mib": 81_920});
        let templates = json!({
            "jobsets.jobset.x-k8s.io": ["spec/replicatedJobs/*/template/spec/template"],
            "leaderworkersets.leaderworkerset.x-k8s.io": [
                "spec/leaderWorkerTemplate/leaderTemplate",
                "spec/leaderWorkerTemplate/workerTemplate",
            ],
        });
        let settings = json!({"quota": quota, "webhook": {"templates": templates}});
        let fleet = Fleet::new().with("large", 1, (4, A100)).with("small", 1, (2, A10));
        let bed = Testbed { plane, cluster, name: "kueue" };
        let stage = bed.stage(Setup { settings: settings.clone(), ..Setup::of(fleet) }).await;
        for (node, model) in [("large-00", "NVIDIA-A100-SXM4-80GB"), ("small-00", "NVIDIA-A10")] {
            let labels = Patch::Merge(json!({"metadata": {"labels": {MODEL: model}}}));
            let nodes: Api<Node> = Api::all(admin.clone());
            nodes.patch(node, &PatchParams::default(), &labels).await.expect("it is there");
        }
        let team = |name: &str| Cluster { client: admin.clone(), namespace: name.to_owned() };
        for name in ["team-a", "team-b"] {
            namespace(&admin, name).await;
        }
        let kueue = Kueue::start(plane, &admin, &programs.kueue).await;
        // Now the collector of garbage knows the resources of Kueue.
        let which = "job-controller,garbage-collector-controller";
        let controllers = plane.start_controllers(&programs.controllers, which);
        let webhook = Webhook::start(plane, &stage.cluster, settings).await;
        for object in of_page("kueue.md").iter().filter(|object| is_of_kueue(object)) {
            put(&admin, object).await;
        }
        let (team_a, team_b) = (team("team-a"), team("team-b"));
        let _running = (kueue, controllers, webhook);
        Self { stage, team_a, team_b, compared: Cell::new(0), _running }
    }

    /// Creates a pod in a queue; answers it as stored.
    async fn create(&self, team: &Cluster, queue: &str, plan: &PodPlan, keys: Value) -> Pod {
        let mut pod = json!(plan.to_pod());
        pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue.into();
        json_patch::merge(&mut pod, &keys);
        let pod: Pod = serde_json::from_value(pod).expect("still a pod");
        let created = team.pods().create(&PostParams::default(), &pod).await;
        created.unwrap_or_else(|error| panic!("cannot create {}: {error}", plan.name))
    }

    async fn until(&self, what: &str, is_met: impl Fn(&Pods) -> bool) {
        self.stage.watching.until(what, LIMIT, is_met).await;
    }

    /// Waits until Kueue has reserved these amounts in a queue, by flavor, and that many workloads wait in it.
    async fn reserved(&self, queue: &str, expected: &[(&str, [u64; 3])], pending: u64) {
        let kind = GroupVersionKind::gvk("kueue.x-k8s.io", "v1beta2", "ClusterQueue");
        let queues: Api<DynamicObject> =
            Api::all_with(self.stage.cluster.client.clone(), &ApiResource::from_gvk(&kind));
        let started = clock::now();
        loop {
            let status = queues.get(queue).await.expect("it is there").data["status"].take();
            let is_met = expected.iter().all(|(flavor, amounts)| {
                MARKERS.iter().zip(amounts).all(|(marker, amount)| {
                    total(&status["flavorsReservation"], flavor, marker) == Some(*amount)
                })
            });
            if is_met && status["pendingWorkloads"] == pending {
                let is_some = expected.iter().any(|(_, amounts)| *amounts != [0; 3]);
                self.compared.set(self.compared.get() + usize::from(is_some));
                return;
            }
            let late = started.elapsed() > LIMIT;
            assert!(!late, "{queue}: not {expected:?} and {pending} pending, but {status:#}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Deletes all pods of both teams, and waits until no quota is reserved.
    async fn clear(&self, queues: &[(&str, &str)]) {
        for team in [&self.team_a, &self.team_b] {
            let pods = team.pods();
            for pod in pods.list(&ListParams::default()).await.expect("pods can be listed") {
                team.delete_pod(&pod.name_any()).await;
            }
        }
        self.until("all pods gone", |pods| living(pods).count() == 0).await;
        for (queue, flavor) in queues {
            self.reserved(queue, &[(flavor, [0; 3])], 0).await;
        }
    }

    async fn plain_pods(&self) {
        let half = PodPlan::fraction("half", "0.5");
        let pod = self.create(&self.team_a, "gpus", &half, json!({})).await;
        assert!(is_gated(&pod), "{:?}", pod.spec);
        let some = PodPlan::memory("some", 10_000);
        self.create(&self.team_a, "gpus", &some, json!({})).await;
        self.until("both bound", |pods| is_bound(pods, "half") && is_bound(pods, "some")).await;
        // 10,000 of 81,920 MiB, rounded up.
        self.reserved("team-a", &[("gpus", [500_000 + 122_071, 40_960 + 10_000, 2])], 0).await;
        self.clear(&[("team-a", "gpus")]).await;
        self.stage.figure("plain pods: gated, admitted, bound");
    }

    async fn borrowed_and_reclaimed(&self) {
        for index in 0..5 {
            let plan = PodPlan::fraction(format!("a-{index}"), "1");
            self.create(&self.team_a, "gpus", &plan, json!({})).await;
        }
        self.until("four of five bound", |pods| bound(pods, "a-") == 4).await;
        self.reserved("team-a", &[("gpus", times(4, WHOLE))], 1).await;
        let waiting = self.stage.watching.ask(|pods| {
            let waiting = living(pods).filter(|seen| seen.bound.is_none());
            waiting.map(|seen| is_gated(&seen.pod)).collect::<Vec<_>>()
        });
        assert_eq!(waiting, [true], "one is gated");
        let asked = clock::now();
        for index in 0..2 {
            let plan = PodPlan::fraction(format!("b-{index}"), "1");
            self.create(&self.team_b, "gpus", &plan, json!({})).await;
        }
        self.until("what is lent comes back", |pods| bound(pods, "b-") == 2).await;
        let after = asked.elapsed();
        self.reserved("team-b", &[("gpus", times(2, WHOLE))], 0).await;
        self.reserved("team-a", &[("gpus", times(2, WHOLE))], 1).await;
        assert_eq!(self.stage.watching.ask(|pods| bound(pods, "a-")), 2);
        self.stage.figure(&format!(
            "five whole GPUs under 2 + 2: 4 ran, 1 gated; the owner's 2 were bound {} ms after it asked",
            clock::ms(after)
        ));
        self.clear(&[("team-a", "gpus"), ("team-b", "gpus")]).await;
    }

    async fn a_group(&self) {
        let member = async |index: usize| {
            let keys = json!({"metadata": {
                "labels": {"kueue.x-k8s.io/pod-group-name": "ring"},
                "annotations": {"kueue.x-k8s.io/pod-group-total-count": "3"},
            }});
            let plan = PodPlan::fraction(format!("ring-{index}"), "0.5");
            self.create(&self.team_a, "gpus", &plan, keys).await
        };
        assert!(is_gated(&member(0).await) && is_gated(&member(1).await));
        // A pod that is complete and came later passes the two.
        self.create(&self.team_a, "gpus", &PodPlan::fraction("later", "0.25"), json!({})).await;
        self.until("the later pod bound", |pods| is_bound(pods, "later")).await;
        assert_eq!(self.stage.watching.ask(|pods| bound(pods, "ring-")), 0, "two of three");
        self.reserved("team-a", &[("gpus", [250_000, 20_480, 1])], 0).await;
        member(2).await;
        self.until("the group bound", |pods| bound(pods, "ring-") == 3).await;
        let all = [1_500_000 + 250_000, 3 * 40_960 + 20_480, 4];
        self.reserved("team-a", &[("gpus", all)], 0).await;
        self.stage.figure("a group of 3: none started before the third was there");
        // Kueue keeps the pods of a group until it has ended.
        for index in 0..3 {
            self.team_a.set_phase(&format!("ring-{index}"), "Succeeded").await;
        }
        self.reserved("team-a", &[("gpus", [250_000, 20_480, 1])], 0).await;
        self.clear(&[("team-a", "gpus")]).await;
    }

    fn jobs(&self) -> Api<Job> {
        Api::namespaced(self.stage.cluster.client.clone(), "team-a")
    }

    /// The Job of the page.
    fn job() -> Job {
        let mut objects = of_page("kueue.md").into_iter();
        let job = objects.find(|object| object.name_any() == "train").expect("a Job");
        serde_json::from_value(json!(job)).expect("it is a Job")
    }

    async fn delete_job(&self, queue: (&str, &str)) {
        let deleted = self.jobs().delete("train", &DeleteParams::background()).await;
        deleted.expect("it is there");
        self.clear(&[queue]).await;
    }

    async fn a_job(&self) {
        let job = Self::job();
        assert_eq!(marker_of(&job), None, "the page shows no markers");
        let stored = self.jobs().create(&PostParams::default(), &job).await.expect("a good Job");
        assert_eq!(marker_of(&stored).as_deref(), Some("610352"));
        self.until("the Job's pods bound", |pods| bound(pods, "train-") == 2).await;
        let (one, two) = ([610_352, 50_000, 1], [1_220_704, 100_000, 2]);
        assert_eq!(times(2, one), two);
        self.reserved("team-a", &[("gpus", two)], 0).await;
        // The same template again, without markers: it is completed again, so that nothing changes. The API
        // server would refuse a change.
        let template = job.spec.as_ref().map(|spec| &spec.template);
        let again = Patch::Merge(json!({"spec": {"template": template}}));
        let patched = self.jobs().patch("train", &PatchParams::default(), &again).await;
        assert_eq!(marker_of(&patched.expect("nothing changes")).as_deref(), Some("610352"));
        self.delete_job(("team-a", "gpus")).await;
        self.stage.figure("a Job whose template had annotations alone: charged exactly");
    }

    /// Kinds that are listed in `webhook.templates`. Their own controllers do not run: what Kueue reserves for them
    /// depends on their templates alone.
    async fn sets_of_jobs_and_workers(&self) {
        let template = |fraction: &str| {
            json!({"metadata": {"annotations": {"gpu-fraction": fraction}}, "spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "main", "image": "local/none"}]}})
        };
        let job = |name: &str, replicas: u64, fraction: &str| {
            let spec = json!({"parallelism": 1, "completions": 1, "template": template(fraction)});
            json!({"name": name, "replicas": replicas, "template": {"spec": spec}})
        };
        let set_of_jobs =
            json!({"replicatedJobs": [job("leader", 1, "0.25"), job("workers", 2, "0.5")]});
        let set_of_workers = json!({"replicas": 1, "rolloutStrategy": {"type": "RollingUpdate"}, "leaderWorkerTemplate": {"size": 3,
            "leaderTemplate": template("0.25"), "workerTemplate": template("0.5")}});
        let all = [250_000 + 2 * 500_000, 20_480 + 2 * 40_960, 3];
        for (group, version, kind, spec) in [
            ("jobset.x-k8s.io", "v1alpha2", "JobSet", set_of_jobs),
            ("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", set_of_workers),
        ] {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
            let client = self.stage.cluster.client.clone();
            let api: Api<DynamicObject> = Api::namespaced_with(client, "team-a", &resource);
            let object = json!({"apiVersion": format!("{group}/{version}"), "kind": kind, "spec": spec,
                "metadata": {"name": "set", "namespace": "team-a", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}});
            let object = serde_json::from_value(object).expect("an object");
            put(&self.stage.cluster.client, &object).await;
            self.reserved("team-a", &[("gpus", all)], 0).await;
            let deleted = api.delete("set", &DeleteParams::background()).await;
            deleted.expect("it is there");
            self.reserved("team-a", &[("gpus", [0; 3])], 0).await;
        }
        self.stage.figure("a JobSet and a LeaderWorkerSet with annotations alone: charged exactly");
    }

    async fn flavors(&self) {
        let wants = |model: &str| json!({"spec": {"nodeSelector": {MODEL: model}}});
        let plan = |name: &str| PodPlan::fraction(name, "1");
        let on = |node: &'static str, name: &'static str| {
            move |pods: &Pods| {
                let spec = find(pods, name).and_then(|seen| seen.pod.spec.as_ref());
                spec.is_some_and(|spec| spec.node_name.as_deref() == Some(node))
            }
        };
        self.create(&self.team_a, "models", &plan("named"), wants("NVIDIA-A10")).await;
        self.until("a pod on the model it names", on("small-00", "named")).await;
        self.reserved("models", &[("a100", [0; 3]), ("a10", WHOLE)], 0).await;
        self.create(&self.team_a, "models", &plan("first"), json!({})).await;
        self.until("a pod on the first model", on("large-00", "first")).await;
        self.create(&self.team_a, "models", &plan("second"), json!({})).await;
        self.until("a pod on the second model", on("small-00", "second")).await;
        self.create(&self.team_a, "models", &plan("third"), json!({})).await;
        self.reserved("models", &[("a100", WHOLE), ("a10", times(2, WHOLE))], 1).await;
        assert!(!self.stage.watching.ask(|pods| is_bound(pods, "third")));
        self.stage
            .figure("flavors: each pod on a node of its model, the second when the first is full");
        self.clear(&[("models", "a100"), ("models", "a10")]).await;
    }

    async fn weights(&self) {
        for index in 0..4 {
            let plan = PodPlan::fraction(format!("light-{index}"), "1");
            self.create(&self.team_a, "light", &plan, json!({})).await;
        }
        self.until("all four bound", |pods| bound(pods, "light-") == 4).await;
        self.reserved("light", &[("gpus", times(4, WHOLE))], 0).await;
        for index in 0..4 {
            let plan = PodPlan::fraction(format!("heavy-{index}"), "1");
            self.create(&self.team_b, "heavy", &plan, json!({})).await;
        }
        self.until("three of four bound", |pods| bound(pods, "heavy-") == 3).await;
        self.reserved("heavy", &[("gpus", times(3, WHOLE))], 1).await;
        self.reserved("light", &[("gpus", WHOLE)], 0).await;
        self.stage.figure("weights 1 and 3: one and three of four GPUs");
        self.clear(&[("light", "gpus"), ("heavy", "gpus")]).await;
    }

    /// A queue that does not cover all markers admits no GPU pod, and says so.
    async fn a_marker_that_is_not_covered(&self) {
        let admin = &self.stage.cluster.client;
        let kind = |kind: &str| json!({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind});
        let quota = |name: &str| json!({"name": name, "nominalQuota": "4M"});
        let covered = ["cpu", MARKERS[0], MARKERS[2]];
        let mut queue = kind("ClusterQueue");
        queue["metadata"] = json!({"name": "partial"});
        queue["spec"] = json!({"namespaceSelector": {}, "resourceGroups": [{
            "coveredResources": covered,
            "flavors": [{"name": "gpus", "resources": covered.map(quota)}],
        }]});
        let mut local = kind("LocalQueue");
        local["metadata"] = json!({"name": "partial", "namespace": "team-a"});
        local["spec"] = json!({"clusterQueue": "partial"});
        for object in [queue, local] {
            put(admin, &serde_json::from_value(object).expect("an object")).await;
        }
        let plan = PodPlan::fraction("uncovered", "0.5");
        self.create(&self.team_a, "partial", &plan, json!({})).await;
        let kind = GroupVersionKind::gvk("kueue.x-k8s.io", "v1beta2", "Workload");
        let workloads: Api<DynamicObject> =
            Api::namespaced_with(admin.clone(), "team-a", &ApiResource::from_gvk(&kind));
        let started = clock::now();
        loop {
            let all = workloads.list(&ListParams::default()).await.expect("they can be listed");
            let conditions = all.iter().map(|it| it.data["status"]["conditions"].to_string());
            let conditions: String = conditions.collect();
            if conditions.contains("resource gpupack.dev/gpu-memory unavailable in ClusterQueue") {
                break;
            }
            assert!(started.elapsed() < LIMIT, "not said: {conditions}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        self.stage.figure(
            "a queue that does not cover a marker: the pod waits, and its Workload says why",
        );
        self.clear(&[]).await;
    }

    /// The webhook is not asked about templates: Kueue reserves nothing, and the pods are refused.
    async fn a_job_that_was_not_completed(&self) {
        let webhooks: Api<MutatingWebhookConfiguration> =
            Api::all(self.stage.cluster.client.clone());
        let mut configured = webhooks.get("gpupack").await.expect("it is there");
        let all = configured.webhooks.as_mut().expect("it has webhooks");
        all.retain(|webhook| webhook.name != "templates.gpupack.dev");
        let replaced = webhooks.replace("gpupack", &PostParams::default(), &configured).await;
        replaced.expect("a good configuration");
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let started = clock::now();
        while self.jobs().create(&dry, &Self::job()).await.is_ok_and(|it| marker_of(&it).is_some())
        {
            assert!(started.elapsed() < LIMIT, "the webhook is still asked about templates");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let created = self.jobs().create(&PostParams::default(), &Self::job()).await;
        created.expect("nothing refuses it");
        let refusal = self.refusal_of_pods().await;
        assert!(refusal.contains("`gpupack.dev/gpu-share` is `0` there"), "{refusal}");
        assert!(refusal.contains("Create the Job again"), "{refusal}");
        self.reserved("team-a", &[("gpus", [0; 3])], 0).await;
        assert_eq!(self.stage.watching.ask(|pods| living(pods).count()), 0, "no pod");
        self.delete_job(("team-a", "gpus")).await;
        self.stage.figure("a Job that was admitted for nothing gets no pod");
    }

    /// What the Job controller says about pods that it cannot create.
    async fn refusal_of_pods(&self) -> String {
        let events: Api<Event> = Api::namespaced(self.stage.cluster.client.clone(), "team-a");
        let started = clock::now();
        loop {
            let all = events.list(&ListParams::default()).await.expect("events can be listed");
            let mut failures = all.into_iter().filter(|event| {
                event.reason.as_deref() == Some("FailedCreate")
                    && event.involved_object.kind.as_deref() == Some("Job")
            });
            if let Some(event) = failures.next() {
                return event.message.unwrap_or_default();
            }
            assert!(started.elapsed() < LIMIT, "no event about the Job's pods");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Whether an object of the page is Kueue's: the rest is the configuration of gpupack, and a Job.
fn is_of_kueue(object: &DynamicObject) -> bool {
    let types = object.types.as_ref();
    types.is_some_and(|types| types.api_version.starts_with("kueue.x-k8s.io/"))
}

fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
    gates.into_iter().flatten().any(|gate| gate.name == GATE)
}

fn living(pods: &Pods) -> impl Iterator<Item = &Seen> {
    pods.values().filter(|seen| seen.gone.is_none())
}

/// How many living pods are bound whose names begin so.
fn bound(pods: &Pods, prefix: &str) -> usize {
    let is_it = |seen: &&Seen| seen.bound.is_some() && seen.pod.name_any().starts_with(prefix);
    living(pods).filter(is_it).count()
}

/// The total of a resource in a flavor.
fn total(reservation: &Value, flavor: &str, resource: &str) -> Option<u64> {
    let named = |list: &Value, name: &str| {
        list.as_array()?.iter().find(|item| item["name"] == name).cloned()
    };
    let resource = named(&named(reservation, flavor)?["resources"], resource)?;
    let total = resource["total"].as_str().map(str::to_owned);
    parse_count(&total.unwrap_or_else(|| resource["total"].to_string())).ok()
}

/// The share marker in the template of a Job.
fn marker_of(job: &Job) -> Option<String> {
    let spec = job.spec.as_ref()?.template.spec.as_ref()?;
    let limits = spec.containers.first()?.resources.as_ref()?.limits.as_ref()?;
    limits.get(MARKERS[0]).map(|amount| amount.0.clone())
}

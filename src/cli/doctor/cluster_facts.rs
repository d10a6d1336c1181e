//! Reads everything that the checks look at, each object once.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, ServiceReference, ValidatingAdmissionPolicy,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ResourceQuota, Secret, Service};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::version::Info;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use serde_json::Value;

use crate::base::connect::Server;
use crate::base::reader::{ObjectPath, Read, Reader, ReviewAnswer, Unread};
use crate::doctor::admission::{Policy, of_certificates, own, shipped, trial};
use crate::doctor::finding::{Findings, short};
use crate::doctor::nodes::{ClusterFleet, Reports};
use crate::doctor::objects::{NodeSummary, OwnPod, WorkloadSummary};
use crate::doctor::operator::driver_upgrades::OperatorFacts;
use crate::doctor::operator::mig_monitors::Monitor;
use crate::doctor::parts::configuration;
use crate::doctor::proof::certificates::{Served, ShownFiles, Trust};
use crate::doctor::proof::handshake::{Door, chain};
use crate::doctor::rights::{self, NeededRight, Places};
use crate::doctor::table::NOT_MOUNTED;
use kube_api::config::file::Config;
use kube_api::config::identity::TlsConfig;
use kube_api::config::lease::LEASE_NAME;
use runtime::certificates::REPLICA_NAME;
use server::issuing::authority::BUNDLE;
use server::issuing::objects as issuing;
use server::rotation::plan::CertificateOwner;
use wire::api::commands::Check;
use wire::api::state::State;

/// Objects of gpupack.
const OWN: &str = "&labelSelector=app.kubernetes.io/name%3Dgpupack";

/// NVIDIA's DRA driver of GPUs.
const DRA_DRIVER: &str = "gpu.nvidia.com";

/// Where rights of the user are reviewed, and those of others.
const OWN_REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// What to check, and with what.
pub(crate) struct CheckPlan<'a> {
    pub(crate) reader: &'a Reader,
    pub(crate) server: &'a Server,
    /// Where gpupack is, and where a pod is tried.
    pub(crate) places: Places,
    /// kube-scheduler's configuration, if the user names its file.
    pub(crate) scheduler_file: Option<String>,
    /// Whether pods are started that look at what containers get.
    pub(crate) probes: bool,
    /// The version of this program.
    pub(crate) program: &'a str,
    /// The time of the wall clock, in seconds since 1970.
    pub(crate) now_unix_seconds: i64,
}

/// Labels of each namespace.
pub(crate) type Labels = BTreeMap<String, BTreeMap<String, String>>;

impl CheckPlan<'_> {
    /// The version of the API server.
    pub(crate) async fn version(&self) -> Read<Info> {
        self.reader.path("/version").await
    }

    /// The rights that are needed, and whether the user has them.
    pub(crate) async fn reviews(&self) -> Vec<(String, Read<ReviewAnswer>)> {
        let trial = rights::PODS.within(&self.places.trial);
        let create = (format!("create pods in namespace {}", self.places.trial), &trial, "create");
        let needed = rights::needed(&self.places);
        let reads = needed.iter().map(|target| (target.right(), target, target.verb()));
        let asked = reads.chain([create]).map(async |(right, target, verb)| {
            (right, self.reader.review(OWN_REVIEWS, &rights::review(target, verb, "")).await)
        });
        futures::future::join_all(asked).await
    }

    /// Pods of a part of gpupack.
    async fn pods(&self, namespace: &str, part: &str) -> Read<Vec<OwnPod>> {
        let query = format!("{OWN},app.kubernetes.io/component%3D{part}");
        self.reader.list(&rights::PODS.within(namespace), &query, OwnPod::of).await
    }

    /// An object of the namespace of the extender.
    fn own(&self, all: &ObjectPath, name: &str) -> ObjectPath {
        all.within(&self.places.system).named(name)
    }

    /// The file that a part reads from its ConfigMap.
    async fn file_of(&self, part: &Read<WorkloadSummary>) -> Read<String> {
        let part = part.as_ref().map_err(Clone::clone)?;
        let (map, file) = part.config_map().ok_or(Unread::Absent)?;
        let map: ConfigMap = self.reader.object(&self.own(&rights::CONFIG_MAPS, &map)).await?;
        map.data.and_then(|mut data| data.remove(&file)).ok_or(Unread::Absent)
    }
}

/// What was read.
pub(crate) struct ClusterFacts {
    /// Where gpupack is, by its configuration.
    pub(crate) places: Places,
    pub(crate) namespaces: Read<Labels>,
    pub(crate) parts: DeployedParts,
    pub(crate) config: Option<Config>,
    /// What there is to say about the configuration.
    pub(crate) configured: Findings,
    pub(crate) lease: Read<Lease>,
    /// Whether the extender has the rights that it needs.
    pub(crate) rights: Vec<(NeededRight, Read<ReviewAnswer>)>,
    pub(crate) fleet: ClusterFleet,
    pub(crate) operator: OperatorFacts,
    /// DaemonSets that have MIG instances open.
    pub(crate) monitors: Read<Vec<Option<Monitor>>>,
    pub(crate) service: Read<Service>,
    pub(crate) user_pods: UserPods,
    pub(crate) admission: AdmissionFacts,
    pub(crate) api_service: Read<APIService>,
    /// Certificates, if the configuration is known and they are mounted.
    pub(crate) certificates: Vec<Result<Served, Check>>,
}

/// The parts of gpupack that Deployments run.
pub(crate) struct DeployedParts {
    pub(crate) extender: Read<WorkloadSummary>,
    pub(crate) extender_pods: Read<Vec<OwnPod>>,
    pub(crate) webhook: Read<WorkloadSummary>,
    pub(crate) scheduler: Read<WorkloadSummary>,
    /// kube-scheduler's file in a ConfigMap.
    pub(crate) scheduler_file: Read<String>,
}

/// What the pods of users need, and how they fail.
pub(crate) struct UserPods {
    pub(crate) runtime_classes: Vec<(String, Read<()>)>,
    /// Pods and texts of events GpuStartFailed.
    pub(crate) events: Read<Vec<(String, String)>>,
    pub(crate) quotas: Read<Vec<(String, Vec<String>)>>,
    pub(crate) priority_classes: Read<Vec<(String, i32)>>,
}

/// What the API server asks and applies before it stores a pod.
pub(crate) struct AdmissionFacts {
    pub(crate) webhooks: Read<Vec<MutatingWebhook>>,
    /// What becomes of a good pod and of a bad one, if there is a webhook.
    pub(crate) trials: Option<[Read<ReviewAnswer>; 2]>,
    pub(crate) devices_policy: Read<ValidatingAdmissionPolicy>,
    pub(crate) policies: Vec<(Policy, Read<Value>)>,
}

impl ClusterFacts {
    /// Reads all. `step` learns what is read now.
    pub(crate) async fn read(plan: &CheckPlan<'_>, step: &dyn Fn(&str)) -> Self {
        let CheckPlan { reader, places, .. } = plan;
        step("namespaces and Deployments");
        let namespaces = reader.list(&rights::NAMESPACES, "", labels).await;
        let deployments = rights::DEPLOYMENTS.within(&places.system);
        let all = reader.list(&deployments, OWN, WorkloadSummary::of_deployment).await;
        let [extender, webhook, scheduler] =
            ["extender", "webhook", "scheduler"].map(|part| part_of(&all, part));
        let extender_pods = plan.pods(&places.system, "extender").await;
        let (configured, config) = configuration(&plan.file_of(&extender).await);
        let known = config.clone().unwrap_or_default();
        let mut places = places.clone();
        places.agents =
            config.as_ref().map_or(places.agents, |config| config.agents.namespace.clone());
        let lease = rights::LEASES.within(&known.lease.namespace).named(LEASE_NAME);
        let lease = reader.object(&lease).await;
        let account =
            extender.iter().find_map(|workload| workload.pods.service_account_name.clone());
        let account = account.unwrap_or_else(|| "gpupack".to_owned());
        let rights = rights_of(plan, &account, config.as_ref()).await;
        step("nodes, agents and their reports");
        let fleet = fleet(plan, &places, config.as_ref()).await;
        let operator = OperatorFacts::read(reader).await;
        let monitors = reader.list(&rights::DAEMON_SETS, "", Monitor::of).await;
        let service = plan.own(&rights::SERVICES, "gpupack");
        step("runtime, quotas and events");
        let user_pods = UserPods::read(plan, config.as_ref(), &fleet).await;
        step("admission");
        let webhooks = reader.list(&rights::WEBHOOKS, OWN, webhooks_of).await;
        let webhooks: Read<Vec<_>> = webhooks.map(|all| all.into_iter().flatten().collect());
        let of_pods = webhooks.iter().find_map(|all| own(all));
        let api_service = reader.object(&rights::queries()).await;
        let mut certificates = Vec::new();
        if let Some(config) = &config {
            certificates.extend(of_webhook(plan, &webhook, config, of_pods).await.map(Ok));
            certificates.extend(of_extender(plan, &extender, config, &api_service).await);
        }
        Self {
            parts: DeployedParts {
                scheduler_file: plan.file_of(&scheduler).await,
                extender,
                extender_pods,
                webhook,
                scheduler,
            },
            service: reader.object(&service).await,
            admission: AdmissionFacts {
                trials: if of_pods.is_some() { Some(trials(plan, &known).await) } else { None },
                devices_policy: reader.object(&rights::POLICIES.named("gpupack-devices")).await,
                policies: policies(plan, &account, &known).await,
                webhooks,
            },
            namespaces: namespaces.map(BTreeMap::from_iter),
            places,
            config,
            configured,
            lease,
            rights,
            fleet,
            operator,
            monitors,
            user_pods,
            api_service,
            certificates,
        }
    }
}

impl UserPods {
    async fn read(plan: &CheckPlan<'_>, config: Option<&Config>, fleet: &ClusterFleet) -> Self {
        let (reader, reason) = (plan.reader, "&fieldSelector=reason%3DGpuStartFailed");
        let runtime_classes = runtime_classes(plan, config, fleet).await;
        let (events, quotas, priority_classes) = tokio::join!(
            reader.list(&rights::EVENTS, reason, start_failure),
            reader.list(&rights::ALL_QUOTAS, "", quota),
            reader.list(&rights::CLASSES, "", priority),
        );
        Self { runtime_classes, events, quotas, priority_classes }
    }
}

fn labels(namespace: Namespace) -> (String, BTreeMap<String, String>) {
    let metadata = namespace.metadata;
    (metadata.name.unwrap_or_default(), metadata.labels.unwrap_or_default())
}

fn webhooks_of(configuration: MutatingWebhookConfiguration) -> Vec<MutatingWebhook> {
    configuration.webhooks.unwrap_or_default()
}

fn priority(class: PriorityClass) -> (String, i32) {
    (class.metadata.name.unwrap_or_default(), class.value.unwrap_or_default())
}

fn part_of(all: &Read<Vec<WorkloadSummary>>, component: &str) -> Read<WorkloadSummary> {
    let all = all.as_ref().map_err(Clone::clone)?;
    all.iter().find(|workload| workload.component == component).cloned().ok_or(Unread::Absent)
}

/// The rights of the extender for what is configured.
async fn rights_of(
    plan: &CheckPlan<'_>,
    account: &str,
    config: Option<&Config>,
) -> Vec<(NeededRight, Read<ReviewAnswer>)> {
    let needed = config.map(rights::of_extender).unwrap_or_default();
    let asked = needed.into_iter().map(async |right| {
        let review = right.review(&plan.places.system, account);
        (right, plan.reader.review(REVIEWS, &review).await)
    });
    futures::future::join_all(asked).await
}

async fn fleet(plan: &CheckPlan<'_>, places: &Places, config: Option<&Config>) -> ClusterFleet {
    let reader = plan.reader;
    let sets = rights::DAEMON_SETS.within(&places.agents);
    let sets = reader.list(&sets, OWN, WorkloadSummary::of_daemon_set).await;
    let daemon_set = part_of(&sets, "agent");
    let selector =
        daemon_set.as_ref().ok().and_then(|workload| workload.pods.node_selector.clone());
    let selector = selector.unwrap_or_default();
    let seen_node = |node| {
        let seen = NodeSummary::of(node, &selector, config);
        NodeSummary { is_selected: seen.is_selected && daemon_set.is_ok(), ..seen }
    };
    let (nodes, pods, of_dra, state) = tokio::join!(
        reader.list(&rights::NODES, "", seen_node),
        plan.pods(&places.agents, "agent"),
        slices(reader),
        plan.server.ask::<State>("/v1/state"),
    );
    let reports = state.map(Reports::of).map_err(|why| why.to_string());
    let of_dra = of_dra.map(|nodes| nodes.into_iter().flatten().collect());
    let agent_sets =
        sets.map(|sets| sets.into_iter().filter(|it| it.component == "agent").collect());
    ClusterFleet { nodes, daemon_set, agent_sets, pods, reports, of_dra }
}

/// Nodes whose GPUs NVIDIA's DRA driver gives out, also in a cluster from before version 1 of that group.
async fn slices(reader: &Reader) -> Read<Vec<Option<String>>> {
    match reader.list(&rights::SLICES, "", node_of_dra).await {
        Err(Unread::Absent) => {
            let earlier = ObjectPath { version: "v1beta1", ..rights::SLICES.clone() };
            reader.list(&earlier, "", node_of_dra).await
        }
        answer => answer,
    }
}

/// The node of a slice of that driver.
fn node_of_dra(slice: ResourceSlice) -> Option<String> {
    slice.spec.node_name.filter(|_| slice.spec.driver == DRA_DRIVER)
}

/// The RuntimeClasses that pods of gpupack and agents name.
async fn runtime_classes(
    plan: &CheckPlan<'_>,
    config: Option<&Config>,
    fleet: &ClusterFleet,
) -> Vec<(String, Read<()>)> {
    let of_pods = config.and_then(|config| config.webhook.runtime_class.clone());
    let of_agents =
        fleet.daemon_set.iter().find_map(|workload| workload.pods.runtime_class_name.clone());
    let names: BTreeSet<String> = of_pods.into_iter().chain(of_agents).collect();
    let mut classes = Vec::new();
    for name in names {
        let class: Read<Value> = plan.reader.object(&rights::RUNTIME_CLASSES.named(&name)).await;
        classes.push((name, class.map(drop)));
    }
    classes
}

fn start_failure(event: Event) -> (String, String) {
    let about = event.regarding.unwrap_or_default();
    let (place, name) = (about.namespace.unwrap_or_default(), about.name.unwrap_or_default());
    (format!("{place}/{name}"), short(&event.note.unwrap_or_default()))
}

fn quota(quota: ResourceQuota) -> (String, Vec<String>) {
    let (place, name) = (quota.metadata.namespace, quota.metadata.name);
    let keys = quota.spec.and_then(|spec| spec.hard).unwrap_or_default().into_keys();
    (format!("{}/{}", place.unwrap_or_default(), name.unwrap_or_default()), keys.collect())
}

async fn trials(plan: &CheckPlan<'_>, config: &Config) -> [Read<ReviewAnswer>; 2] {
    let path = format!("/api/v1/namespaces/{}/pods?dryRun=All", plan.places.trial);
    let scheduler = config.scheduler_names.first().map_or("gpupack", String::as_str);
    let [good, bad] = ["0.5", "2"].map(|share| trial("gpupack-doctor", share, scheduler));
    tokio::join!(plan.reader.review(&path, &good), plan.reader.review(&path, &bad)).into()
}

async fn policies(
    plan: &CheckPlan<'_>,
    account: &str,
    config: &Config,
) -> Vec<(Policy, Read<Value>)> {
    let system = &plan.places.system;
    let mut all = shipped(system, account);
    let certificates = config.certificates.as_ref();
    if certificates.is_some_and(|section| section.make || section.publish_ca_bundles) {
        all.extend(of_certificates(system, account));
    }
    let read = all.into_iter().map(async |policy| {
        let object = plan.reader.object(&policy.target).await;
        (policy, object)
    });
    futures::future::join_all(read).await
}

/// The certificate of the webhook, if it mounts the Secret with it.
async fn of_webhook(
    plan: &CheckPlan<'_>,
    part: &Read<WorkloadSummary>,
    config: &Config,
    webhook: Option<&MutatingWebhook>,
) -> Option<Served> {
    let path = &config.webhook.certificate_file;
    let secret = part.as_ref().ok()?.secret_of(path.to_str()?)?;
    let client = webhook.map(|webhook| &webhook.client_config);
    let called =
        client.and_then(|client| called_name(client.service.as_ref(), client.url.as_deref()));
    let called = called.unwrap_or_default();
    let (check, part, port) =
        ("certificate of the webhook", "webhook", config.webhook.listen.port());
    let sought =
        Sought { check, secret: &secret, file: file_name(path), part, port, called: &called };
    let mut served = sought.seen(plan).await;
    served.trusts.extend(client.map(|client| Trust {
        from: "caBundle of the MutatingWebhookConfiguration",
        ca: client.ca_bundle.as_ref().map(|ca| ca.0.clone()),
        name: called.clone(),
        fix: "set it to the CA of the certificate (docs/admission.md#install)",
    }));
    Some(served)
}

/// The certificate of the extender, if it has one: in the Secret that it fills itself, or in one that it mounts.
async fn of_extender(
    plan: &CheckPlan<'_>,
    part: &Read<WorkloadSummary>,
    config: &Config,
    service: &Read<APIService>,
) -> Option<Result<Served, Check>> {
    let tls: &TlsConfig = config.tls.as_ref()?;
    let makes = config.certificates.as_ref().is_some_and(|certificates| certificates.make);
    let (secret, file, ca_file) = if makes {
        (
            Some(issuing::secret_of(CertificateOwner::Extender).to_owned()),
            issuing::CERTIFICATE,
            BUNDLE,
        )
    } else {
        let path = tls.certificate_file.to_str()?;
        let mounted = part.as_ref().ok().and_then(|workload| workload.secret_of(path));
        (mounted, file_name(&tls.certificate_file), file_name(&tls.ca_file))
    };
    let Some(secret) = secret else { return Some(Err(NOT_MOUNTED.with([]))) };
    let spec = service.as_ref().ok().and_then(|service| service.spec.as_ref());
    let called = spec.and_then(|spec| spec.service.as_ref()).and_then(|service| {
        Some(format!("{}.{}.svc", service.name.as_deref()?, service.namespace.as_deref()?))
    });
    let called = called.unwrap_or_default();
    let asked_by = if called.is_empty() { REPLICA_NAME } else { called.as_str() };
    let (check, part, port) =
        ("certificate of the extender", "extender", config.page_listen.port());
    let sought = Sought { check, secret: &secret, file, part, port, called: asked_by };
    let mut served = sought.seen(plan).await;
    let own_ca = served.shown.as_ref().ok().and_then(|shown| shown.file(ca_file));
    let of_replicas = Trust {
        from: "its own CA",
        ca: own_ca.map(<[u8]>::to_vec),
        name: REPLICA_NAME.to_owned(),
        fix: "make a certificate of that CA with the name gpupack-extender",
    };
    // A handshake shows no CA.
    let has_own_ca = own_ca.is_some() || !served.from.starts_with(POD);
    served.trusts.extend(has_own_ca.then_some(of_replicas));
    served.trusts.extend(spec.map(|spec| Trust {
        from: "caBundle of the APIService",
        ca: spec.ca_bundle.as_ref().map(|ca| ca.0.clone()),
        name: called.clone(),
        fix: "set it to the CA of the certificate (deploy/api-service.yaml says how)",
    }));
    Some(Ok(served))
}

/// The name of a file without its folder.
fn file_name(path: &std::path::Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// What a certificate that was seen in a handshake begins with.
const POD: &str = "pod ";

/// A certificate, and where it may be seen.
struct Sought<'a> {
    check: &'static str,
    secret: &'a str,
    file: &'a str,
    /// The part that serves it.
    part: &'static str,
    port: u16,
    /// The name by which clients call it.
    called: &'a str,
}

impl Sought<'_> {
    /// The certificate in its Secret, or, where that may not be read, in a handshake with a ready pod that
    /// serves it, if the user may forward its port. No one trusts it yet.
    async fn seen(&self, plan: &CheckPlan<'_>) -> Served {
        let of_secret = plan.own(&rights::SECRETS, self.secret);
        let secret: Read<Secret> = plan.reader.object(&of_secret).await;
        let shown = secret.map(|secret| ShownFiles::of(secret.data.unwrap_or_default()));
        let from = format!("Secret {}", self.secret);
        let (from, shown) = match shown {
            Err(Unread::Forbidden(right)) => match self.in_a_handshake(plan, &right).await {
                Some(Ok((pod, shown))) => (format!("{POD}{pod}"), Ok(shown)),
                Some(Err(why)) => (from, Err(Unread::Forbidden(why))),
                None => (from, Err(Unread::Forbidden(right))),
            },
            shown => (from, shown),
        };
        let file = self.file.to_owned();
        Served { check: self.check, from, file, shown, trusts: Vec::new() }
    }

    async fn in_a_handshake(
        &self,
        plan: &CheckPlan<'_>,
        right: &str,
    ) -> Option<Result<(String, ShownFiles), String>> {
        let namespace = plan.places.system.as_str();
        let review = rights::review(&rights::PODS.within(namespace), "create", "portforward");
        let may_forward = rights::is_allowed(&plan.reader.review(OWN_REVIEWS, &review).await);
        may_forward.filter(|may| *may)?;
        let pods = plan.pods(namespace, self.part).await;
        let pod = pods.into_iter().flatten().find(|pod| pod.is_ready)?.name;
        let door = Door { namespace, pod: &pod, port: self.port, called: self.called };
        Some(match chain(plan.reader, &door).await {
            Ok(chain) => Ok((pod, ShownFiles::seen(self.file, &chain))),
            Err(why) => Err(format!("{right}, or a handshake with pod {pod}: {}", short(&why))),
        })
    }
}

/// The name by which the API server calls a Service, or an address.
fn called_name(service: Option<&ServiceReference>, url: Option<&str>) -> Option<String> {
    match service {
        Some(service) => Some(format!("{}.{}.svc", service.name, service.namespace)),
        None => url?.parse::<hyper::Uri>().ok()?.host().map(str::to_owned),
    }
}

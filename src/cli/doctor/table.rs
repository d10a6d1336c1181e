//! The table of checks: under the name of each check, what is read for it (`Unread`), what may be found, and how
//! to fix that. `cluster_facts` reads, and the rules of the other files choose the rows.

use crate::doctor::finding::CheckRow;
use wire::api::commands::CheckState::{self, NotChecked, Ok as Good, Problem, Warning};

/// What could not be read.
#[expect(non_upper_case_globals, reason = "it stands for a state")]
const Unread: CheckState = NotChecked;

macro_rules! table {
    ($($check:literal { $($row:ident $state:ident $found:literal $(=> $fix:expr)?;)* })*) => {
        $($(pub(crate) const $row: CheckRow =
            CheckRow { check: $check, state: $state, found: $found, fix: [$($fix,)? ""][0] };)*)*
    };
}

// Fixes of several rows.
const LABEL: &str =
    "kubectl label namespace {0} pod-security.kubernetes.io/enforce={1} --overwrite";
const DESCRIBE: &str =
    "kubectl describe pods -A -l app.kubernetes.io/name=gpupack,app.kubernetes.io/component={3}";
const LOG: &str = "read the extender's log, and the chapter GpupackNoLeader of docs/runbook.md";
const NOT_ASKED: &str = "see why the webhook is not asked: matchConditions and namespaceSelector of the \
     MutatingWebhookConfiguration, and docs/admission.md";
const UPGRADE: &str = "helm upgrade with the chart of this program's release, or deploy/render and kubectl apply -f \
     deploy/{2}";
const MAKER: &str = "see who makes it: Certificates in docs/install.md; where gpupack does, the leader's log says why not";
const UPGRADE_BY_HAND: &str = "let upgrades wait for labels of these pods (waitForCompletion.podSelector), or drain \
     each node yourself while it is upgraded: docs/platforms.md#driver-upgrades";
const RENEWAL: &str = "see why it was not renewed: the log of the leader, or `kubectl describe certificate` \
     with cert-manager; if the CA of gpupack ends, replace it: docs/install.md#replace-the-ca";

table! {
    "Kubernetes version" {
        VERSION Unread "the version of the API server";
        NO_VERSION NotChecked "`{0}.{1}` is no version" => "compare it with docs/operations.md";
        OLD_VERSION Problem "{0}.{1} ({2}): it has no admission policies, and tokens of agents name no node"
            => "upgrade to 1.32; until then any client that may patch pods can edit placements";
        NO_HINTS Warning "{0}.{1} ({2}): a bind does not make kube-scheduler look at other waiting pods"
            => "upgrade to 1.32, or with 1.31 turn on the feature gate SchedulerQueueingHints";
        VERSION_OK Good "{0}.{1} ({2})";
    }
    "rights of this user" {
        USER Unread "its rights";
        USER_NOT_REVIEWED NotChecked "{0}" => "see the checks below";
        USER_LACKS NotChecked "{0}"
            => "let a cluster administrator run it, or give the user the ClusterRole gpupack-doctor \
                (deploy/doctor.yaml)";
        USER_OK Good "it has the {0} rights that this command needs";
    }
    "namespaces" {
        NAMESPACE Unread "namespace {0}";
        NO_NAMESPACE Problem "namespace {0} does not exist"
            => "kubectl apply -f deploy/rbac.yaml, or name yours with --system-namespace";
        STANDARD_OK Good "{0} enforces {1}";
        STANDARD_FREE Good "{0} enforces no standard";
        STANDARD_FORBIDS Problem "{0} enforces {2}, which forbids the agents' hostPID" => LABEL;
        STANDARD_OTHER Warning "{0} enforces {2}" => LABEL;
        NO_STANDARD Warning "{0} enforces no Pod Security standard" => LABEL;
    }
    "extender" { // or another part
        DEPLOYMENT Unread "its Deployment";
        NO_DEPLOYMENT Problem "there is no Deployment with this part of gpupack"
            => "install it (docs/operations.md), or name its namespace with --system-namespace";
        SCALED_DOWN Problem "Deployment {0}: {1} of {2} replicas ready" => "scale it up, with `kubectl scale`";
        NONE_READY Problem "Deployment {0}: {1} of {2} replicas ready" => DESCRIBE;
        FEW_READY Warning "Deployment {0}: {1} of {2} replicas ready" => DESCRIBE;
        ALL_READY Good "Deployment {0}: {1} of {2} replicas ready";
    }
    "leader" {
        LEASE Unread "the Lease";
        LEADER_LABEL Unread "the label of the leader's pod";
        ALONE Good "the extender runs without replicas, and needs no Lease";
        NO_LEASE Problem "there is no Lease: no replica leads" => LOG;
        NOT_HELD Problem "no replica holds the Lease" => LOG;
        NOT_RENEWED Problem "{0} renewed the Lease {1}" => LOG;
        NOT_LABELED Problem "{0} holds the Lease, but {1} has the label gpupack.dev/leader"
            => "run it again in some seconds; then check the policy gpupack-extender and the rights of \
                deploy/rbac.yaml";
        LEADER_OK Good "{0} holds the Lease and has the label";
    }
    "extender configuration" {
        CONFIG Unread "its ConfigMap";
        NO_CONFIG Problem "its ConfigMap or the file in it is missing"
            => "helm upgrade with your values, or deploy/render and kubectl apply -f deploy/extender.yaml";
        CONFIG_FAULT Problem "{0}"
            => "correct it in the ConfigMap (docs/configuration.md), and restart the extender";
        CONFIG_PLAIN Warning "valid; plain text: no client proves who it is"
            => "set `tls`, or apply deploy/network-policy.yaml where policies are enforced";
        CONFIG_LOCAL Warning "valid; its ports can be reached on its own machine only"
            => "set listen, page_listen, agents_listen and metrics_listen";
        CONFIG_THREADS Warning "{0}" => "leave it out where products of half precision matter";
        CONFIG_OK Good "valid; clients prove who they are (`tls`)";
    }
    "rights of the extender" {
        EXTENDER Unread "its rights";
        NOT_REVIEWED NotChecked "whether it may {0}: needs the right to create subjectaccessreviews"
            => "let a cluster administrator run it";
        MAY_NOT_EVICT Problem "it may not {0}, which {1} in the configuration need"
            => "set rbac.evict: true of the chart, or apply deploy/evict.yaml; without evictions set \
                preemption: {enabled: false} and guard: {evict: false}";
        MAY_NOT_MOVE Problem "it may not {0}, which {1} in the configuration need"
            => "set rbac.moves: true of the chart, or apply deploy/moves.yaml";
        EXTENDER_MAY Good "it may {0}, which {1} in the configuration need";
    }
    "kube-scheduler configuration" {
        SCHEDULER Unread "its Deployment";
        SCHEDULER_MAP Unread "its ConfigMap";
        SCHEDULER_ADDRESS Unread "whether urlPrefix is the Service's";
        NOT_COMPARED NotChecked "the extender's configuration, with which it is compared, is not known"
            => "see the check `extender configuration`";
        NO_SCHEDULER_MAP Problem "its ConfigMap or the file in it is missing"
            => "helm upgrade with your values, or deploy/render and kubectl apply -f deploy/scheduler.yaml";
        IN_PLACE NotChecked "gpupack is in place: the file is on the machines of the control plane"
            => "copy it from there (flag --config of kube-scheduler) and run: gpupack doctor \
                --scheduler-config FILE";
        NO_SCHEDULER Problem "there is no kube-scheduler for GPU pods, and gpupack is not in place"
            => "kubectl apply -f deploy/scheduler.yaml, or set scheduler_names: [default-scheduler]";
        NO_FILE Problem "it cannot be read: {0}" => "begin again with deploy/scheduler.yaml, as deploy/render writes it";
        NOT_OURS Problem "none of its {0} is gpupack's"
            => "take the section `extenders` from deploy/scheduler.yaml, as deploy/render writes it";
        NO_ADDRESS Problem "urlPrefix `{0}` is no address" => "set urlPrefix: http://gpupack.gpu-system.svc:8080/v1";
        ODD_HOST Problem "urlPrefix names `{0}`, which the extender does not accept (421)"
            => "name the extender's Service in urlPrefix, or add that name to allowed_hosts";
        ODD_IP Problem "urlPrefix names {0}, which is no address of the Service gpupack"
            => "put its address there: kubectl -n gpu-system get service gpupack";
        ODD_PATH Problem "urlPrefix `{0}` does not end with /v1" => "end urlPrefix with /v1: the verbs are below that path";
        NOT_HTTPS Problem "urlPrefix `{0}` is not https, but the extender has `tls`" => "begin urlPrefix with https://";
        NOT_HTTP Problem "urlPrefix `{0}` is not http, but the extender has no `tls`" => "begin urlPrefix with http://";
        ODD_VERB Problem "{0} is {1}" => "set {0}: {2}";
        ODD_PREEMPT Problem "preemptVerb is `{0}`" => "set preemptVerb: preempt, or leave it out";
        ODD_TIMEOUT Problem "httpTimeout is {0}, but scheduler_timeout_seconds is {1}"
            => "set httpTimeout: {1}s in the ConfigMap and restart kube-scheduler, or change \
                scheduler_timeout_seconds of the extender";
        LIGHT Warning "weight is {0}: other scores can outvote gpupack" => "set weight: {1}";
        WHOLE_NODES Warning "nodeCacheCapable is not true: kube-scheduler sends whole nodes with each call"
            => "set nodeCacheCapable: true";
        IGNORABLE Problem "ignorable is true: without an answer, pods are placed unchecked" => "set ignorable: false";
        ONLY_SCHEDULER_TLS Problem "enableHTTPS is true, but the extender has no `tls`"
            => "set `tls` in the extender's configuration, or enableHTTPS: false";
        ONLY_EXTENDER_TLS Problem "enableHTTPS is not true, but the extender has `tls`"
            => "set enableHTTPS: true and tlsConfig, as in deploy/scheduler.yaml";
        NOT_VERIFIED Problem "tlsConfig does not verify the extender's certificate"
            => "set tlsConfig.caFile, and insecure: false";
        NO_CLIENT_CERTIFICATE Problem "tlsConfig has no certFile and keyFile: the extender refuses kube-scheduler"
            => "give it a certificate with the name {0}";
        ODD_SERVER_NAME Warning "tlsConfig.serverName is `{0}`"
            => "set serverName: {1}, unless the certificate has that name";
        SAMPLED Warning "percentageOfNodesToScore is not 100: in 100 nodes and more, only a sample is tried"
            => "set percentageOfNodesToScore: 100";
        NO_PROFILE Problem "its profiles ({0}) are not in scheduler_names ({1})"
            => "give profile and scheduler_names the same name";
        COUNTED Problem "profile {0} counts {..}: pods that request it wait forever"
            => "add it to ignoredResources of NodeResourcesFit (in place: to managedResources with \
                ignoredByScheduler: true), and restart kube-scheduler";
        UNMANAGED Problem "managedResources lacks a marker: pods with it are placed without gpupack"
            => "list {0} in managedResources";
        EVICTS_UNASKED Problem "profile {0} evicts pods without asking gpupack"
            => "set preemptVerb: preempt, and restart kube-scheduler";
        NO_PREEMPTION Problem "profile {0} has no DefaultPreemption: gpupack does not learn where CPU is short"
            => "remove DefaultPreemption from `disabled`, set preemptVerb: preempt, and restart kube-scheduler";
        SCHEDULER_OK Good "it fits the extender; profiles: {0}";
    }
    "agents" {
        NODES_WITH_GPUS Unread "the nodes";
        DAEMON_SET Unread "their DaemonSet";
        AGENT_PODS Unread "their pods";
        NO_REPORTS NotChecked "what they report: {0}"
            => "check that a replica leads; the user needs gpupack-view (deploy/rbac.yaml), and --server \
                or --service name an extender elsewhere";
        NO_DAEMON_SET Problem "there is no DaemonSet of the agents"
            => "install the agents (agents.enabled of the chart, or deploy/agent.yaml), or see agents.namespace of the \
                configuration";
        NO_AGENT Problem "{#node} with GPUs without an agent: {..}"
            => "compare the labels and taints of the node with nodeSelector and tolerations of the \
                DaemonSet (deploy/agent.yaml)";
        UNREADY Problem "{#agent} not ready on {..}"
            => "kubectl describe pods -A -l app.kubernetes.io/name=gpupack,\
                app.kubernetes.io/component=agent, and read their logs";
        SILENT Problem "{#node} not reporting: {..}"
            => "check the agent there (chapter GpupackNodesNotReporting of docs/runbook.md): such a node \
                takes no new GPU pods";
        SEES_NO_GPU Problem "{#node} whose agent sees no GPU: {..}"
            => "check the driver there (nvidia-smi), and that the agent runs under NVIDIA's RuntimeClass";
        FAULTY Warning "GPUs with a fault on {..}" => "gpupack top gpus shows the faults, docs/runbook.md what to do";
        NO_UVM Warning "the kernel module nvidia-uvm is not loaded on {..}: CUDA fails there unless the container toolkit loads it"
            => "load it on the node (nvidia-modprobe -u, or modprobe nvidia-uvm)";
        NO_GPUS Warning "no node with GPUs was found"
            => "install GPU feature discovery, which labels nodes with nvidia.com/gpu.present, or label \
                them yourself";
        AGENTS_OK Good "each of {0} has an agent that reports; {1}";
    }
    "kubelets" {
        OLD_KUBELETS Problem
            "kubelet of {#node} is older than 1.33 and cannot restart containers for borrow: {..}"
            => "upgrade kubelet there to 1.33, or move the nodes to a pool without this key (docs/borrowing.md)";
        UNKNOWN_KUBELETS NotChecked "the version of kubelet on {..}"
            => "compare kubeletVersion in the status of the node with docs/borrowing.md";
        KUBELETS_OK Good "1.33 or newer on {0} whose pods are moved";
    }
    "pods that end" {
        HUNG Warning "{#pod} should have ended and still {0} GPUs, so nothing is planned there: {..}"
            => "look at kubelet on the node, and for processes that wait for the driver or a file system there";
    }
    "owners of GPUs" {
        OF_KUBELET Unread "what kubelet gives out";
        OF_DRA Unread "what DRA drivers give out";
        KUBELET_OWNS Problem "kubelet also gives out GPUs of {#node} of gpupack ({..}; {0})"
            => "turn off NVIDIA's device plugin there: kubectl label node {1} \
                nvidia.com/gpu.deploy.device-plugin=false --overwrite";
        MIG_CHANGES Warning "MIG Manager is changing {#node}: {..}"
            => "wait until nvidia.com/mig.config.state is `success`; it evicts no pod of gpupack: delete those that are \
                left there, or drain the node";
        MIG_FAILED Warning "MIG Manager failed on {#node}: {..}"
            => "read its log there; it cannot change a GPU that pods use, and evicts no pod of gpupack: drain the node \
                first";
        MIG_MANAGED Problem "MIG Manager may change {#node} whose MIG instances gpupack makes: {..}"
            => "turn MIG Manager off there: kubectl label node {0} nvidia.com/gpu.deploy.mig-manager=false \
                nvidia.com/mig.config- --overwrite";
        DRA_OWNS Problem "NVIDIA's DRA driver gives out the GPUs of {#node} of gpupack: {..}"
            => "keep the DRA driver off gpupack's nodes (its kubelet plugin has a nodeSelector)";
        OWNERS_OK Good "only gpupack gives out the GPUs of its nodes";
    }
    "rights for MIG" {
        AGENT_SETS Unread "the DaemonSets of agents";
        NOT_MAKING Problem "agents without `--mig-on-demand` make no MIG instances, in pools with mig: on_demand, on \
            {#node}: {..}"
            => "set agents.migOnDemand: true in the values of the chart, or apply deploy/agent-mig.yaml (docs/mig.md)";
        LACKS_RIGHTS Problem "agents that are to make MIG instances lack {0}, on {#node}: {..}"
            => "take the container `driver` and the pod's settings from deploy/agent-mig.yaml: with less, the container \
                toolkit gives no right to MIG, by its release and mode (docs/platforms.md#rights-for-mig)";
        MIG_RIGHTS_OK Good "agents have them where gpupack makes MIG instances";
    }
    "monitors of MIG instances" {
        MONITORS Unread "the DaemonSets of monitors";
        HOLDS_INSTANCES Warning "{0} ({1}) keeps MIG instances open that gpupack is to remove, on {#node}: {..}"
            => "turn it off there: kubectl label node {2} {3}=false --overwrite (docs/mig.md#monitors)";
        KEEPS_INSTANCES Warning "{0} ({1}) keeps MIG instances open that gpupack is to remove, on {#node}: {..}"
            => "keep it off these nodes, by the nodeSelector or nodeAffinity of the DaemonSet (docs/mig.md#monitors)";
        NO_MONITORS Good "no DaemonSet of NVIDIA's monitors runs where gpupack makes MIG instances";
    }
    "driver upgrades" {
        CLUSTER_POLICY Unread "the ClusterPolicy of the GPU Operator";
        NVIDIA_DRIVER Unread "the NVIDIADrivers of the GPU Operator";
        GPU_CLUSTER Unread "the GPUCluster of the GPU Operator";
        NO_DRAIN Warning "{..}: drivers are upgraded automatically without a drain. Only pods that request \
            nvidia.com/gpu are evicted, so an upgrade hangs on pods of gpupack that request by annotation"
            => UPGRADE_BY_HAND;
        LATE_DRAIN Warning "{..}: drivers are upgraded automatically, and the drain follows only where evicting pods \
            that request nvidia.com/gpu has failed: an upgrade hangs on pods of gpupack that request by annotation"
            => UPGRADE_BY_HAND;
        UPGRADES_WAIT Good "{..}: drivers are upgraded once the pods with the labels of waitForCompletion have ended; \
            all pods of gpupack that request by annotation need these";
        NO_UPGRADES Good "{..}: drivers are not upgraded automatically";
        IS_GPU_CLUSTER Warning "NVIDIA's DRA driver gives out GPUs (GPUCluster {..})"
            => "keep gpupack's nodes out of it: a node has one owner; and set no agents.nodeSelector \
                nvidia.com/gpu.deploy.client, which the GPU Operator does not label there";
    }
    "versions" {
        NO_IMAGE NotChecked "no image of gpupack is known" => "see the checks above";
        MIXED Warning "the pods of the {0} are of several versions: {..}"
            => "wait until the rollout has ended (kubectl rollout status)";
        OTHER_RELEASE Problem "the {0} is {..}, the extender {1}"
            => "use images of one release for all parts: see Upgrade in docs/install.md";
        OTHER_PROGRAM Warning "this program is {0}, the extender {1}" => "use the program of the extender's release";
        VERSIONS_OK Good "{0}: {1}; this program: {2}";
    }
    "container runtime" {
        RUNTIME_CLASS Unread "RuntimeClass {0}";
        NO_RUNTIME_CLASS Problem "RuntimeClass {0} does not exist: pods that name it are refused"
            => "install NVIDIA's container toolkit or the GPU Operator, or set webhook.runtime_class";
        UNKNOWN_RUNTIME NotChecked "which RuntimeClass pods of gpupack name is not known"
            => "see the check `extender configuration`";
        DEFAULT_RUNTIME Good "NVIDIA's runtime is the default of the nodes (`runtime_class: none`)";
        RUNTIME_OK Good "RuntimeClass {..} exists";
    }
    "container starts" {
        START_FAILURES Unread "events GpuStartFailed";
        NOT_STARTED Warning "containers of {..} could not start: {0}" => "gpupack explain NAMESPACE/POD says what to do";
        STARTS_OK Good "no event GpuStartFailed";
    }
    "quotas" {
        QUOTAS Unread "ResourceQuotas";
        USELESS_KEYS Warning "keys that count nothing: {..}"
            => "write `requests.` before the name of a marker, such as requests.gpupack.dev/gpu-share; \
                the API server accepts other keys and counts nothing for them";
        BLIND_QUOTAS Warning "requests.nvidia.com/gpu counts no fraction of a GPU: {..}"
            => "add requests.gpupack.dev/gpu-share, in millionths of a GPU (docs/requests.md), unless only \
                kubelet's GPU pods are meant";
        QUOTAS_OK Good "none that counts nvidia.com/gpu alone, or nothing";
    }
    "workload classes" {
        PRIORITY_CLASSES Unread "PriorityClasses";
        UNKNOWN_WORKLOADS NotChecked "which there are is not known" => "see the check `extender configuration`";
        WRONG_CLASSES Problem "PriorityClasses: {..}"
            => "create them: pods whose label chooses such a class are refused, or get another priority than \
                `workloads` says. A value cannot be changed: delete the class first";
        NO_WORKLOADS Good "none are configured";
        WORKLOADS_OK Good "the PriorityClasses of {..} exist";
    }
    "admission webhook" {
        WEBHOOK Unread "its MutatingWebhookConfiguration";
        EXEMPT Unread "whether the exempt namespaces exist";
        NO_WEBHOOK Warning "no MutatingWebhookConfiguration: nothing gives containers their GPU, and no other"
            => "install it: docs/admission.md";
        LENIENT Problem "failurePolicy is not Fail: while it is down, pods are created without it"
            => "set failurePolicy: Fail (deploy/webhook.yaml)";
        ASKED_ITSELF Problem "it is asked about pods of {..}: gpupack cannot start without itself"
            => "leave out its own namespaces in namespaceSelector, as deploy/webhook.yaml does";
        EXEMPT_MISSING Warning "it leaves out namespaces that do not exist: {..}"
            => "take them out of namespaceSelector, here and in the policy gpupack-devices: a \
                client that creates such a namespace can use every GPU from there";
        CONDITIONS_UNKNOWN NotChecked "whether its conditions fit the configuration, which is not known"
            => "see the check `extender configuration`";
        NO_CONDITIONS Warning "it has no matchConditions: no pod can be created while it is down"
            => "set matchConditions as deploy/webhook.yaml does";
        SCHEDULER_UNNAMED Problem "its conditions do not name the scheduler {..}"
            => "name all of scheduler_names in matchConditions, and in the policy gpupack-devices";
        OTHER_CLASSES Problem "its RuntimeClasses without GPUs are not those of the configuration: {..}"
            => "list the same ones in webhook.runtime_classes_without_gpus, in matchConditions and in the \
                policy gpupack-devices";
        NOT_TAKEN_OVER Problem "take_over_whole_gpus is true, but its conditions do not send pods with nvidia.com/gpu"
            => "set config.webhook.take_over_whole_gpus in the values of the chart, or run deploy/render with them";
        TEMPLATES_UNSENT Warning
            "it is not asked about templates of {..}: Kueue counts nothing for them, and their pods are refused"
            => "set config.webhook.templates in the values of the chart, or run deploy/render with them \
                (docs/admission.md#templates)";
        WEBHOOK_OK Good "it fits the configuration; it leaves out {0}";
    }
    "admission of a pod" {
        DRY_RUN Unread "a dry run";
        BAD_DRY_RUN Unread "a dry run of a bad pod";
        TRIAL_EXEMPT NotChecked "the webhook leaves out the namespace {0}" => "name another one with --namespace";
        NO_TRIAL_NAMESPACE NotChecked "namespace {0} does not exist" => "name another one with --namespace";
        REFUSED Problem "a GPU pod cannot be created in {0}: {1}" => "{2}";
        NO_DEVICES Problem "its container does not take NVIDIA_VISIBLE_DEVICES from the placement" => NOT_ASKED;
        NO_MARKER Problem "its container has no marker gpupack.dev/gpu-share" => NOT_ASKED;
        OTHER_SCHEDULER Problem "it gets the scheduler {0}, not {1}"
            => "restart extender and webhook after a change of scheduler_names";
        BAD_REFUSED_ODDLY Warning "a pod with `gpu-fraction: 2` is refused for another reason: {0}"
            => "try another namespace with --namespace";
        BAD_CREATED Problem "a pod with `gpu-fraction: 2` would be created"
            => "compare the MutatingWebhookConfiguration with deploy/webhook.yaml";
        ADMISSION_OK Good "a GPU pod is completed for {0}, a bad one refused";
    }
    "policy gpupack-devices" {
        DEVICES Unread "the policy";
        NO_DEVICES_POLICY Warning "it does not exist: a later webhook can open every GPU to a pod"
            => "helm upgrade, or deploy/render and kubectl apply -f deploy/webhook.yaml; not with \
                unmanaged_runtime_class: allow";
        DEVICES_OK Good "it exists, with the RuntimeClasses of the configuration";
    }
    "policies" {
        POLICY Unread "{0} {1}";
        NO_POLICY Problem "{0} {1} does not exist: it keeps nothing from being edited" => UPGRADE;
        OTHER_POLICY Problem "{0} {1} is not the one of this program: {3} differs" => UPGRADE;
        POLICIES_OK Good "{0} policies and bindings are those of this program";
    }
    "queries through the API server" {
        API_SERVICE Unread "the APIService";
        NO_API_SERVICE Warning "there is no APIService: page and command line need a port of their own"
            => "set apiService.enabled in the values of the chart, or kubectl apply -f deploy/api-service.yaml";
        API_SERVICE_PLAIN Problem "there is an APIService, but the extender has no `tls`"
            => "set `tls` (docs/configuration.md), or kubectl delete apiservice v1.inspection.gpupack.dev";
        API_SERVICE_DOWN Problem "the APIService is not available: {0}"
            => "check its caBundle, the network policy for port 8081, and that a replica leads";
        API_SERVICE_NEW Warning "the API server has not tried the APIService yet" => "run it again";
        API_SERVICE_OK Good "the APIService is available";
    }
    "certificate of the extender" { // or of the webhook
        CERTIFICATE Unread "{0}";
        NOT_MOUNTED NotChecked "the extender has `tls`, but mounts no Secret with its certificate"
            => "check the volume for tls.certificate_file";
        NO_SECRET Problem "{0} does not exist: its pods cannot start" => MAKER;
        NO_CERTIFICATE Problem "{0}: {1}" => MAKER;
        ENDED Problem "{0}: it ended {1} days ago" => RENEWAL;
        ENDS_SOON Warning "{0}: it ends in {1} days" => RENEWAL;
        UNFIT Problem "{0} does not fit {1}: {2}" => "{3}";
        CERTIFICATE_OK Good "{0}: ends in {1} days{2}";
    }
}

{{/* The labels of an object; the argument is its component. */}}
{{- define "gpupack.labels" -}}
app.kubernetes.io/name: gpupack
app.kubernetes.io/component: {{ . }}
app.kubernetes.io/part-of: gpupack
{{- end }}

{{/* An image: by digest where there is one. Arguments: the image, and a tag where it names none. */}}
{{- define "gpupack.image" -}}
{{- $image := index . 0 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 1) }}
{{- end -}}
{{- end }}

{{/* The image of extender, webhook and test. */}}
{{- define "gpupack.ownImage" -}}
{{ include "gpupack.image" (list .Values.image .Chart.AppVersion) }}
{{- end }}

{{/* The image of agents, which has a shell. */}}
{{- define "gpupack.agentImage" -}}
{{ include "gpupack.image" (list .Values.agents.image .Chart.AppVersion) }}
{{- end }}

{{/* Pull secrets of a pod. */}}
{{- define "gpupack.pullSecrets" -}}
{{- with .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Where the pods of one Deployment run: of the cluster's own scheduler, apart from each other. Arguments:
     the root, the values of the component, its name. */}}
{{- define "gpupack.scheduling" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
# The cluster's own scheduler: one that waits for this same pod would wait forever.
schedulerName: default-scheduler
{{- with $root.Values.priorityClass.name }}
# Some clusters allow system classes outside kube-system only where a ResourceQuota names them.
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
# Two replicas on one node are one.
affinity:
  podAntiAffinity:
    {{- if eq $root.Values.antiAffinity "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/name: gpupack
            app.kubernetes.io/component: {{ index . 2 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              app.kubernetes.io/name: gpupack
              app.kubernetes.io/component: {{ index . 2 }}
    {{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* What no container of gpupack outside the agents' namespace may do. */}}
{{- define "gpupack.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The profiles whose pods are gpupack's. */}}
{{- define "gpupack.schedulerNames" -}}
{{- $shipped := ternary (list "default-scheduler") (list "gpupack") .Values.inPlace -}}
{{- .Values.config.scheduler_names | default $shipped | toJson -}}
{{- end }}

{{/* The names by which the extender may be called. */}}
{{- define "gpupack.allowedHosts" -}}
{{- $namespace := .Release.Namespace -}}
{{- $service := printf "gpupack.%s.svc" $namespace -}}
{{- $names := list "gpupack" (printf "gpupack.%s" $namespace) $service (printf "%s.%s" $service .Values.clusterDomain) -}}
{{- concat $names (.Values.config.allowed_hosts | default list) | uniq | toJson -}}
{{- end }}

{{/* gpupack.yaml. */}}
{{- define "gpupack.config" -}}
# A port for each kind of client: kube-scheduler, people, agents, Prometheus and kubelet.
listen: 0.0.0.0:8080
page_listen: 0.0.0.0:8081
agents_listen: 0.0.0.0:8082
metrics_listen: 0.0.0.0:8083
{{- if .Values.tls.enabled }}
# By these, kube-scheduler, agents and replicas prove who they are.
tls:
  certificate_file: /etc/gpupack/tls/tls.crt
  key_file: /etc/gpupack/tls/tls.key
  ca_file: /etc/gpupack/tls/ca.crt
agents: {namespace: {{ .Values.agents.namespace.name }}}
{{- else }}
# Clients prove nothing: only network policies protect these ports.
plain_text: true
{{- end }}
{{- include "gpupack.certificatesConfig" . }}
# Behind the API server's proxy, a browser sends the API server's name: add it, or use
# `kubectl port-forward`. The command line needs neither.
allowed_hosts: {{ include "gpupack.allowedHosts" . }}
# Which of the replicas leads: the one that holds this Lease.
lease: {{ mergeOverwrite (deepCopy (.Values.config.lease | default dict)) (dict "namespace" .Release.Namespace) | toJson }}
# The profiles whose pods are gpupack's.
scheduler_names: {{ include "gpupack.schedulerNames" . }}
# binpack, spread or fragmentation.
policy: {{ .Values.config.policy | default "fragmentation" }}
webhook:
  {{- $fixed := dict "listen" "0.0.0.0:8443" }}
  {{- with .Values.webhook.toleratedTaints }}
  {{- $_ := set $fixed "tolerated_taints" . }}
  {{- end }}
  {{- mergeOverwrite (deepCopy (.Values.config.webhook | default dict)) $fixed | toYaml | nindent 2 }}
{{- if not .Values.rbac.evict }}
# gpupack has no right to evict.
preemption: {{ mergeOverwrite (deepCopy (.Values.config.preemption | default dict)) (dict "enabled" false) | toJson }}
{{- end }}
{{- $config := ternary .Values.config (omit .Values.config "preemption") .Values.rbac.evict }}
{{- if .Values.workloads.enabled }}
{{- if .Values.config.workloads }}
{{- fail "config.workloads: with workloads.enabled, set workloads.classes instead" }}
{{- end }}
# Classes of workloads, with the PriorityClasses of the chart.
workloads: {{- toYaml .Values.workloads.classes | nindent 2 }}
{{- end }}
{{- with omit $config "allowed_hosts" "lease" "scheduler_names" "policy" "webhook" "certificates" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Whether the extender gives the CA to agents and, where cert-manager does not, to the API server. */}}
{{- define "gpupack.publishesCa" -}}
{{- if and .Values.tls.enabled (not (include "gpupack.knownCa" .)) -}}
true
{{- end -}}
{{- end }}

{{/* Whether it also writes the CA into webhook configuration and APIService. */}}
{{- define "gpupack.publishesCaBundles" -}}
{{- if and (include "gpupack.publishesCa" .) (ne .Values.certificates.source "cert-manager") -}}
true
{{- end -}}
{{- end }}

{{/* Further names of the extender. It knows its Service in the usual domain only. */}}
{{- define "gpupack.certificateNames" -}}
{{- $names := .Values.certificates.names -}}
{{- if ne .Values.clusterDomain "cluster.local" -}}
{{- $names = append $names (printf "gpupack.%s.svc.%s" .Release.Namespace .Values.clusterDomain) -}}
{{- end -}}
{{- $names | uniq | toJson -}}
{{- end }}

{{/* The section `certificates` of gpupack.yaml, where the extender has a part in them. */}}
{{- define "gpupack.certificatesConfig" -}}
{{- if include "gpupack.publishesCa" . }}
{{- $section := dict "make" false }}
{{- if eq .Values.certificates.source "gpupack" }}
{{- $section = mergeOverwrite (deepCopy (.Values.config.certificates | default dict)) (dict "make" true "names" (include "gpupack.certificateNames" . | fromJsonArray)) }}
{{- else if include "gpupack.publishesCaBundles" . }}
{{- $section = dict "make" false "publish_ca_bundles" true }}
{{- end }}
# Who makes the certificates, and who says which CA they have.
certificates: {{ $section | toJson }}
{{- end }}
{{- end }}

{{/* The configuration of the second kube-scheduler: the file, with what depends on this release. */}}
{{- define "gpupack.schedulerConfig" -}}
{{- $config := .Files.Get "files/scheduler.yaml" | fromYaml -}}
{{- $_ := set $config.leaderElection "resourceNamespace" .Release.Namespace -}}
{{- $profile := index $config.profiles 0 -}}
{{- $fit := index $profile.pluginConfig 0 -}}
{{- $_ := set $fit.args "ignoredResources" (concat $fit.args.ignoredResources .Values.scheduler.ignoredResources | uniq) -}}
{{- $profiles := list -}}
{{- range include "gpupack.schedulerNames" . | fromJsonArray -}}
{{- $profiles = append $profiles (merge (dict "schedulerName" .) $profile) -}}
{{- end -}}
{{- $_ := set $config "profiles" $profiles -}}
{{- $extender := index $config.extenders 0 -}}
{{- $scheme := ternary "https" "http" .Values.tls.enabled -}}
{{- $_ := set $extender "urlPrefix" (printf "%s://gpupack.%s.svc:8080/v1" $scheme .Release.Namespace) -}}
{{- $_ := set $extender "httpTimeout" (printf "%vs" (.Values.config.scheduler_timeout_seconds | default 10)) -}}
{{- if .Values.tls.enabled -}}
{{- $folder := "/etc/gpupack/tls" -}}
{{- $files := dict "caFile" (printf "%s/ca.crt" $folder) "certFile" (printf "%s/tls.crt" $folder) "keyFile" (printf "%s/tls.key" $folder) -}}
{{- $_ := set $extender "enableHTTPS" true -}}
{{- $_ := set $extender "tlsConfig" (merge (dict "serverName" "gpupack-extender") $files) -}}
{{- end -}}
{{ toYaml $config }}
{{- end }}

{{/* The folder of MPS' pipes on each node. */}}
{{- define "gpupack.mpsFolder" -}}
{{- (.Values.config.webhook | default dict).mps_folder | default "/run/gpupack/mps" -}}
{{- end }}

{{/* RuntimeClasses that give out no GPU, as a list of CEL. */}}
{{- define "gpupack.runtimeClassesWithoutGpus" -}}
{{- $webhook := .Values.config.webhook | default dict -}}
{{- $classes := list "crun" "kata" "runc" -}}
{{- if hasKey $webhook "runtime_classes_without_gpus" -}}
{{- $classes = $webhook.runtime_classes_without_gpus | default list -}}
{{- end -}}
['{{ join "', '" (prepend $classes "") }}']
{{- end }}

{{/* Whether a pod names a scheduler of gpupack, in CEL. Every pod names the cluster's own. Arguments: the root, the pod. */}}
{{- define "gpupack.namesOurScheduler" -}}
{{- $names := without (include "gpupack.schedulerNames" (index . 0) | fromJsonArray) "default-scheduler" -}}
{{- if $names -}}
(has({{ index . 1 }}.spec.schedulerName) && {{ index . 1 }}.spec.schedulerName in ['{{ join "', '" $names }}'])
{{- else -}}
false
{{- end -}}
{{- end }}

{{/* Whether a pod uses kubelet's device plugin, in CEL: for `webhook.take_over_whole_gpus`. Argument of this and the
next: the pod. */}}
{{- define "gpupack.takesOver" -}}
({{ . }}.spec.containers + (has({{ . }}.spec.initContainers) ? {{ . }}.spec.initContainers : []))
  .size() <= 100 &&
({{ . }}.spec.containers + (has({{ . }}.spec.initContainers) ? {{ . }}.spec.initContainers : []))
  .exists(c, has(c.resources) && has(c.resources.limits) &&
    'nvidia.com/gpu' in c.resources.limits) ||
{{- end }}

{{/* Whether a pod has an annotation of gpupack, in CEL. */}}
{{- define "gpupack.hasOurAnnotation" -}}
(has({{ . }}.metadata.annotations) && ({{ . }}.metadata.annotations.size() > 1000 ||
  {{ . }}.metadata.annotations.exists(key,
    key.startsWith('gpu-fraction') || key.startsWith('gpu-memory') ||
    key.startsWith('gpupack.dev/') || key.startsWith('placed.gpupack.dev/') ||
    (key.startsWith('nvidia.com/container.') && key.contains('.gpu-memory.')))))
{{- end }}

{{/* Whether a pod has a marker, in CEL. */}}
{{- define "gpupack.hasMarker" -}}
({{ . }}.spec.containers + (has({{ . }}.spec.initContainers) ? {{ . }}.spec.initContainers : []))
  .size() > 100 ||
({{ . }}.spec.containers + (has({{ . }}.spec.initContainers) ? {{ . }}.spec.initContainers : []))
  .exists(c, has(c.resources) && has(c.resources.limits) && (c.resources.limits.size() > 100 ||
    c.resources.limits.exists(key, key.startsWith('gpupack.dev/'))))
{{- end }}

{{/* Namespaces whose pods are not the webhook's. */}}
{{- define "gpupack.excludedNamespaces" -}}
{{- concat (list "kube-system" "kube-public" "kube-node-lease" .Release.Namespace .Values.agents.namespace.name) .Values.webhook.excludedNamespaces | uniq | toYaml -}}
{{- end }}

{{/* The Secret of a component with its certificate. Arguments: the root, the component. */}}
{{- define "gpupack.secret" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $shipped := printf "gpupack-%s-tls" $component -}}
{{- if eq $root.Values.certificates.source "existing" -}}
{{- index $root.Values.certificates.existing (printf "%sSecret" $component) | default $shipped -}}
{{- else -}}
{{- $shipped -}}
{{- end -}}
{{- end }}

{{/* The CA in PEM where this chart knows it, else nothing. */}}
{{- define "gpupack.knownCa" -}}
{{- if eq .Values.certificates.source "existing" -}}
{{- .Values.certificates.existing.ca -}}
{{- else if eq .Values.certificates.source "helm" -}}
{{- index (include "gpupack.made" . | fromJson) "ca" | default "" -}}
{{- end -}}
{{- end }}

{{/* Certificates that this chart makes, once for each rendering, and takes from the cluster at an upgrade. */}}
{{- define "gpupack.made" -}}
{{- if not .Values.made -}}
{{- $_ := set .Values "made" (include "gpupack.make" . | fromJson) -}}
{{- end -}}
{{- .Values.made | toJson -}}
{{- end }}

{{/* The components that have a certificate. */}}
{{- define "gpupack.certified" -}}
{{- $components := list -}}
{{- if .Values.webhook.enabled -}}
{{- $components = append $components "webhook" -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $components = concat $components (list "extender" "scheduler") -}}
{{- end -}}
{{- $components | toJson -}}
{{- end }}

{{- define "gpupack.make" -}}
{{- $made := dict -}}
{{- $namespace := .Release.Namespace -}}
{{- $complete := true -}}
{{- $components := include "gpupack.certified" . | fromJsonArray -}}
{{- range $component := $components -}}
{{- $secret := lookup "v1" "Secret" $namespace (printf "gpupack-%s-tls" $component) -}}
{{- $data := (($secret | default dict).data) | default dict -}}
{{- if and (index $data "tls.crt") (index $data "tls.key") (index $data "ca.crt") -}}
{{- $_ := set $made $component (dict "crt" (index $data "tls.crt" | b64dec) "key" (index $data "tls.key" | b64dec)) -}}
{{- $_ := set $made "ca" (index $data "ca.crt" | b64dec) -}}
{{- else -}}
{{- $complete = false -}}
{{- end -}}
{{- end -}}
{{- if not $complete -}}
{{- $days := int .Values.certificates.days -}}
{{- $ca := genCA "gpupack" $days -}}
{{- $_ := set $made "ca" $ca.Cert -}}
{{- range $component := $components -}}
{{- $names := include "gpupack.dnsNames" (list $ $component) | fromJsonArray -}}
{{- $pair := genSignedCert (index $names 0) nil $names $days $ca -}}
{{- $_ := set $made $component (dict "crt" $pair.Cert "key" $pair.Key) -}}
{{- end -}}
{{- end -}}
{{- $made | toJson -}}
{{- end }}

{{/* The names in a certificate, the one by which it is known first. Arguments: the root, the component. */}}
{{- define "gpupack.dnsNames" -}}
{{- $root := index . 0 -}}
{{- $namespace := $root.Release.Namespace -}}
{{- $domain := $root.Values.clusterDomain -}}
{{- $names := list "gpupack-scheduler" -}}
{{- if eq (index . 1) "extender" -}}
{{- $names = list "gpupack-extender" "gpupack" (printf "gpupack.%s" $namespace) -}}
{{- $names = concat $names $root.Values.certificates.names -}}
{{- range list "gpupack" "gpupack-replicas" -}}
{{- $names = concat $names (list (printf "%s.%s.svc" . $namespace) (printf "%s.%s.svc.%s" . $namespace $domain)) -}}
{{- end -}}
{{- else if eq (index . 1) "webhook" -}}
{{- $names = list (printf "gpupack-webhook.%s.svc" $namespace) (printf "gpupack-webhook.%s.svc.%s" $namespace $domain) -}}
{{- end -}}
{{- $names | toJson -}}
{{- end }}

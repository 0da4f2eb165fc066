{{- define "tensor-fusion.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride -}}
{{- end }}

{{- define "tensor-fusion.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tensor-fusion.controllerSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: controller
tensor-fusion.ai/component: operator
{{- end }}

{{/* Pools as a JSON list: cluster.pools, or cluster.pool alone. */}}
{{- define "tensor-fusion.pools" -}}
{{- if .Values.cluster.pools -}}
{{- toJson .Values.cluster.pools -}}
{{- else -}}
{{- toJson (list .Values.cluster.pool) -}}
{{- end -}}
{{- end }}

{{/* This version knows no isolation mode policy: the controller falls back to static. */}}
{{- define "tensor-fusion.isolationEnv" }}{{ end }}

{{- define "tensor-fusion.isolationEnv" }}
            - name: TF_ISOLATION_MODE_POLICY
              value: {{ .Values.controller.isolationModePolicy | quote }}
{{- end }}

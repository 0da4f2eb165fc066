ui = true
cluster_name = "nvcf-openbao"
disable_standby_reads = true

listener "tcp" {
  tls_disable = 1
  address = "POD_IP:8200"
  cluster_address = "POD_IP:8201"
}

seal "shamir" {
}

storage "raft" {
  path = "/openbao/data"
  retry_join {
    leader_api_addr = "http://openbao-server-0.openbao-server-internal:8200"
  }
  retry_join {
    leader_api_addr = "http://openbao-server-1.openbao-server-internal:8200"
  }
  retry_join {
    leader_api_addr = "http://openbao-server-2.openbao-server-internal:8200"
  }
}

//! Envoy's configuration.

use std::fmt::Write as _;
use std::net::SocketAddr;

use super::{Svid, TUNNELS};
use crate::world::text;

const TYPE: &str = "type.googleapis.com/envoy.extensions";

/// A port of Envoy's own that leads through a tunnel.
pub(super) struct Way<'a> {
    /// Where Envoy listens, on loopback.
    pub(super) listen: u16,
    /// Where the tunnel's end connects to.
    pub(super) to: SocketAddr,
    /// Who the tunnel's other end must prove to be.
    pub(super) identity: &'a str,
}

/// Envoy takes plain connections and puts each into a tunnel. Its log has a line for each: `way=<port> answer=<…>`.
pub(super) fn client(svid: &Svid, ways: &[Way<'_>]) -> String {
    let [mut listeners, mut clusters] = [String::new(), String::new()];
    for Way { listen, to, identity } in ways {
        let _ = write!(
            listeners,
            r#"
  - name: way{listen}
    address: {{socket_address: {{address: 127.0.0.1, port_value: {listen}}}}}
    filter_chains:
    - filters:
      - name: tcp
        typed_config:
          "@type": {TYPE}.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: way{listen}
          cluster: way{listen}
          max_connect_attempts: 1
          tunneling_config: {{hostname: "{to}", propagate_response_headers: true}}
          access_log:
          - name: log
            typed_config:
              "@type": {TYPE}.access_loggers.stream.v3.StdoutAccessLog
              log_format:
                text_format_source:
                  inline_string: "way={listen} flags=%RESPONSE_FLAGS% failure=%UPSTREAM_TRANSPORT_FAILURE_REASON% answer=%FILTER_STATE(envoy.tcp_proxy.propagate_response_headers)%\n""#
        );
        let _ = write!(
            clusters,
            r#"
  - name: way{listen}
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: way{listen}
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: "{}", port_value: {TUNNELS}}}}}}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": {TYPE}.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    transport_socket:
      name: tls
      typed_config:
        "@type": {TYPE}.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context:
{}"#,
            to.ip(),
            tls(svid, &format!("exact: \"{identity}\""))
        );
    }
    format!("{RUNTIME}\nstatic_resources:\n  listeners:{listeners}\n  clusters:{clusters}\n")
}

/// Envoy serves tunnels: the authority `<pod>:<port>` leads to that port on loopback, for each of `ports`. The peer
/// `banned` is refused.
pub(super) fn server(svid: &Svid, pods: &[std::net::IpAddr], ports: &[u16], banned: &str) -> String {
    let [mut hosts, mut clusters] = [String::new(), String::new()];
    for port in ports {
        let domains: Vec<String> = pods
            .iter()
            .map(|pod| format!("\"{}\"", SocketAddr::new(*pod, *port)))
            .collect();
        let _ = write!(
            hosts,
            r#"
            - name: port{port}
              domains: [{}]
              routes:
              - match: {{connect_matcher: {{}}}}
                route:
                  cluster: port{port}
                  timeout: 0s
                  upgrade_configs: [{{upgrade_type: CONNECT, connect_config: {{}}}}]"#,
            domains.join(", ")
        );
        let _ = write!(
            clusters,
            r#"
  - name: port{port}
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: port{port}
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}"#
        );
    }
    let tls = tls(svid, "prefix: \"spiffe://cluster.local/ns/\"");
    format!(
        r#"{RUNTIME}
static_resources:
  listeners:
  - name: tunnels
    address: {{socket_address: {{address: "::", ipv4_compat: true, port_value: {TUNNELS}}}}}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          "@type": {TYPE}.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context:
{tls}
      filters:
      - name: http
        typed_config:
          "@type": {TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: tunnels
          codec_type: HTTP2
          stream_idle_timeout: 0s
          http2_protocol_options: {{allow_connect: true}}
          upgrade_configs: [{{upgrade_type: CONNECT}}]
          access_log:
          - name: log
            typed_config:
              "@type": {TYPE}.access_loggers.stream.v3.StdoutAccessLog
              log_format:
                text_format_source:
                  inline_string: "peer=%DOWNSTREAM_PEER_URI_SAN% asked=%REQ(:METHOD)%/%PROTOCOL% authority=%REQ(:AUTHORITY)% forwarded=%REQ(FORWARDED)% answer=%RESPONSE_CODE% why=%RESPONSE_CODE_DETAILS%\n"
          http_filters:
          - name: rbac
            typed_config:
              "@type": {TYPE}.filters.http.rbac.v3.RBAC
              rules:
                action: DENY
                policies:
                  banned:
                    permissions: [{{any: true}}]
                    principals: [{{authenticated: {{principal_name: {{exact: "{banned}"}}}}}}]
          - name: router
            typed_config: {{"@type": {TYPE}.filters.http.router.v3.Router}}
          route_config:
            virtual_hosts:{hosts}
  clusters:{clusters}
"#
    )
}

/// Without it Envoy ends a request with the response, so that a server could not end its side first.
const RUNTIME: &str = "
layered_runtime:
  layers:
  - name: half-close
    static_layer: {envoy.reloadable_features.allow_multiplexed_upstream_half_close: true}";

/// What both sides of mutual TLS have in common; the peer's URI must match.
fn tls(svid: &Svid, peer: &str) -> String {
    format!(
        r#"
            tls_params: {{tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3}}
            alpn_protocols: [h2]
            tls_certificates:
            - certificate_chain: {{filename: "{}"}}
              private_key: {{filename: "{}"}}
            validation_context:
              trusted_ca: {{filename: "{}"}}
              match_typed_subject_alt_names: [{{san_type: URI, matcher: {{{peer}}}}}]"#,
        text(&svid.chain),
        text(&svid.key),
        text(&svid.roots)
    )
}

//! An authority for tests, over real TLS and gRPC, with an API server whose word is made up, and what it is asked.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::authentication::v1::{TokenReviewStatus, UserInfo};
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use serde_json::json;
use tonic::transport::{Certificate as Root, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use crate::ca::audit::AuditLog;
use crate::ca::audit::tests::Sink;
use crate::ca::authority::Authority;
use crate::ca::authorize::PodRules;
use crate::ca::counts::Counts;
use crate::ca::limits::LimitSettings;
use crate::ca::review::{Reviewer, Reviews};
use crate::ca::serve::{Server, Settings};
use crate::ca::service::Callers;
use crate::ca::token::{TokenRequest, TokenVerifier, make};
use crate::identity::proto::istio_certificate_service_client::IstioCertificateServiceClient;
use crate::identity::proto::{IMPERSONATED_IDENTITY, IstioCertificateRequest};
use crate::identity::{BoxFuture, Certificate, PrivateKey, SpiffeId, TrustDomain};
use crate::mesh::test_workload as workload;
use crate::mesh::{Mesh, MeshHandle, MeshParts, Node, Protocol, Workload};
use crate::telemetry::LogFormat;

pub(super) const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";
pub(super) const TILL: &str = "spiffe://cluster.local/ns/shop/sa/till";

/// An API server that knows which tokens it has made: `uid` of a pod to what it says of that pod's token.
#[derive(Clone, Default)]
pub(super) struct ApiServer {
    pub(super) says: Arc<Mutex<BTreeMap<String, TokenReviewStatus>>>,
    pub(super) reviews: Arc<Mutex<u32>>,
    pub(super) slow: Arc<Mutex<HashSet<String>>>,
}

impl Reviews for ApiServer {
    fn review(&self, token: String, _: Vec<String>) -> BoxFuture<'_, Result<TokenReviewStatus, String>> {
        Box::pin(async move {
            *self.reviews.lock().unwrap() += 1;
            if self.slow.lock().unwrap().contains(&token) {
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            let unknown = TokenReviewStatus {
                authenticated: Some(false),
                error: Some("the token is not known".into()),
                ..TokenReviewStatus::default()
            };
            Ok(self.says.lock().unwrap().get(&token).cloned().unwrap_or(unknown))
        })
    }
}

impl ApiServer {
    /// A token of an account, bound to what it is bound to.
    pub(super) fn token(&self, account: &str, extra: &[(&str, &str)]) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let claims = json!({ "aud": ["adit-ca"], "exp": now + 600, "jti": fastrand::u64(..) });
        let key = jsonwebtoken::EncodingKey::from_secret(b"the API server's").unwrap();
        let token = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key).unwrap();
        let bound = |(key, value): &(&str, &str)| {
            let key = format!("authentication.kubernetes.io/{key}");
            (key, vec![(*value).to_owned()])
        };
        let status = TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec!["adit-ca".into()]),
            error: None,
            user: Some(UserInfo {
                username: Some(format!("system:serviceaccount:{account}")),
                extra: Some(extra.iter().map(bound).collect()),
                ..UserInfo::default()
            }),
        };
        self.says.lock().unwrap().insert(token.clone(), status);
        token
    }

    pub(super) fn token_of_proxy(&self, number: u8) -> String {
        let (pod, uid) = (format!("adit-{number}"), format!("uid-{number}"));
        let node = format!("n{number}");
        let extra = [("pod-name", &*pod), ("pod-uid", &*uid), ("node-name", &*node)];
        self.token("adit-system:adit-node", &extra)
    }
}

pub(super) struct World {
    pub(super) api: ApiServer,
    pub(super) mesh: MeshHandle,
    pub(super) root: String,
    pub(super) port: u16,
    pub(super) audit: Sink,
    pub(super) counts: Counts,
    pub(super) _folder: tempfile::TempDir,
    pub(super) issuer: std::path::PathBuf,
}

pub(super) fn domain() -> TrustDomain {
    TrustDomain::parse("cluster.local").unwrap()
}

/// Node n1 at 127.0.0.1 with a cart, n2 at 127.0.0.2 with a till, and a proxy on each. `without` is left out.
pub(super) fn mesh(without: &str) -> Mesh {
    let mut parts = MeshParts::new(domain(), "cluster.local");
    for (number, pod) in [(1, "cart"), (2, "till")] {
        let node = format!("n{number}");
        parts.nodes.push(Node {
            name: node.as_str().into(),
            zone: "".into(),
            addresses: vec![IpAddr::from([10, 90, 0, number])],
            // Loopback is no node's address; but it may be out of the range that one has.
            ranges: vec![format!("127.0.0.{number}/32").parse().unwrap()],
        });
        let proxy = Workload {
            node: node.as_str().into(),
            uid: format!("uid-{number}").into(),
            addresses: Vec::new(),
            // As if somebody had wanted it in the mesh.
            protocol: Protocol::Hbone,
            identity: SpiffeId::new(&domain(), "adit-system", "adit-node").unwrap(),
            ..workload("adit-system", &format!("adit-{number}"), "10.0.0.1")
        };
        let mut pod = workload("shop", pod, &format!("10.244.{number}.9"));
        pod.node = node.as_str().into();
        parts.workloads.extend([proxy, pod]);
    }
    parts.workloads.retain(|workload| &*workload.name != without);
    Mesh::build(parts).unwrap()
}

/// The authority of a cluster, or one that goes by a key set.
pub(super) async fn serve(reviewed: bool, limits: LimitSettings) -> World {
    let folder = tempfile::tempdir().unwrap();
    let authority = Arc::new(Authority::open(&folder.path().join("ca"), &domain()).unwrap());
    let (api, counts, audit) = (ApiServer::default(), Counts::default(), Sink::default());
    let audiences = vec!["adit-ca".to_owned()];
    let issuer = folder.path().join("issuer");
    let callers = match reviewed {
        true => Callers::Reviewed(Reviewer::new(api.clone(), audiences, counts.clone())),
        false => Callers::KeySet(TokenVerifier::new(issuer.join("jwks.json"), "issuer".into(), audiences)),
    };
    let settings = Settings {
        listen: "127.0.0.1:0".parse().unwrap(),
        names: vec!["localhost".into()],
        node_proxies: vec!["adit-system/adit-node".parse().unwrap()],
        pods: reviewed.then(|| PodRules {
            check_address: true,
            caller_ranges: Vec::new(),
            heard: None,
        }),
        max_ttl: Duration::from_secs(3600),
        default_ttl: Duration::from_secs(3600),
        limits,
    };
    let mesh = MeshHandle::new(mesh(""));
    let log = AuditLog::new(LogFormat::Json, counts.clone(), Box::new(audit.clone()));
    let root = authority.root_pem();
    let server = Server::bind(settings, authority, callers, mesh.clone(), counts.clone(), log);
    let server = server.await.unwrap();
    let port = server.local_addr().port();
    tokio::spawn(server.run(std::future::pending()));
    World {
        api,
        mesh,
        root: root.to_string(),
        port,
        audit,
        counts,
        _folder: folder,
        issuer,
    }
}

impl World {
    /// A connection from the node.
    pub(super) async fn from(&self, node: u8) -> Channel {
        let tls = ClientTlsConfig::new()
            .domain_name("localhost")
            .ca_certificate(Root::from_pem(&self.root));
        Endpoint::from_shared(format!("https://127.0.0.1:{}", self.port))
            .unwrap()
            .local_address(Some(IpAddr::from([127, 0, 0, node])))
            .tls_config(tls)
            .unwrap()
            .connect()
            .await
            .unwrap()
    }

    /// A node token of the kind that is made without a cluster.
    pub(super) fn made(&self, audience: &str, node: &str) -> String {
        make(&TokenRequest {
            dir: self.issuer.clone(),
            issuer: "issuer".into(),
            audience: audience.into(),
            account: "adit-system/adit-node".parse().unwrap(),
            pod: "adit-1".into(),
            node: node.into(),
            ttl: Duration::from_secs(600),
        })
        .unwrap()
    }
}

/// A request for an identity with a new key, which is given too.
pub(super) fn request(token: &str, identity: &str) -> (Request<IstioCertificateRequest>, PrivateKey) {
    let key = PrivateKey::generate().unwrap();
    let kind = Some(Kind::StringValue(identity.to_owned()));
    let mut request = Request::new(IstioCertificateRequest {
        csr: key.request(&SpiffeId::parse(CART).unwrap()).unwrap(),
        validity_duration: 600,
        metadata: Some(Struct {
            fields: [(IMPERSONATED_IDENTITY.into(), Value { kind })].into(),
        }),
    });
    let bearer = format!("Bearer {token}").parse().unwrap();
    request.metadata_mut().insert("authorization", bearer);
    (request, key)
}

pub(super) async fn ask(channel: &Channel, token: &str, identity: &str) -> Result<Certificate, Status> {
    let (request, key) = request(token, identity);
    let mut client = IstioCertificateServiceClient::new(channel.clone());
    let answer = client.create_certificate(request).await?.into_inner();
    Ok(Certificate::new(&SpiffeId::parse(identity).unwrap(), &answer.cert_chain, key).unwrap())
}

pub(super) fn code<T>(outcome: Result<T, Status>) -> Code {
    outcome.map_or_else(|status| status.code(), |_| Code::Ok)
}

//! The client against a server that answers as the test says, over real gRPC and TLS.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::Mutex as StdMutex;
use std::time::{Instant, SystemTime};

use rcgen::{CertifiedIssuer, KeyPair, PublicKeyData as _, SanType};
use tokio::runtime::Runtime;
use tonic::transport::server::{Server, TcpIncoming};
use tonic::transport::{Identity, ServerTlsConfig};
use tonic::{Request, Response, Status};

use super::super::proto::istio_certificate_service_server::{IstioCertificateService, IstioCertificateServiceServer};
use super::super::proto::{IstioCertificateRequest, IstioCertificateResponse};
use super::super::testing::{LeafOptions, TestCa, id};
use super::*;
use crate::identity::CallOutcome;

const DEADLINE: Duration = Duration::from_millis(500);

/// What the server answers, by the request's key (DER) and metadata.
type Script = dyn Fn(&Asked) -> Result<Vec<String>, Status> + Send + Sync;

/// What the server was asked.
#[derive(Debug, Clone)]
struct Asked {
    public_key: Vec<u8>,
    identity: String,
    token: String,
    cluster: String,
    lifetime: i64,
    peer: Option<SocketAddr>,
}

struct Scripted {
    script: StdMutex<Arc<Script>>,
    /// Before each answer.
    delay: StdMutex<Duration>,
    asked: StdMutex<Vec<Asked>>,
}

#[tonic::async_trait]
impl IstioCertificateService for Scripted {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let header = |name: &str| {
            let value = request.metadata().get(name);
            value
                .map(|value| value.to_str().unwrap().to_owned())
                .unwrap_or_default()
        };
        let (token, cluster, peer) = (header("authorization"), header("clusterid"), request.remote_addr());
        let request = request.into_inner();
        let csr = rcgen::CertificateSigningRequestParams::from_pem(&request.csr).unwrap();
        let identity = match &request.metadata.unwrap().fields[IMPERSONATED_IDENTITY].kind {
            Some(Kind::StringValue(identity)) => identity.clone(),
            other => panic!("{other:?}"),
        };
        let asked = Asked {
            public_key: csr.public_key.subject_public_key_info(),
            identity,
            token,
            cluster,
            lifetime: request.validity_duration,
            peer,
        };
        self.asked.lock().unwrap().push(asked.clone());
        let (script, delay) = (self.script.lock().unwrap().clone(), *self.delay.lock().unwrap());
        tokio::time::sleep(delay).await;
        script(&asked).map(|cert_chain| Response::new(IstioCertificateResponse { cert_chain }))
    }
}

/// A CA's server, its files, and a client of it.
struct World {
    ca: Arc<TestCa>,
    scripted: Arc<Scripted>,
    folder: tempfile::TempDir,
    address: SocketAddr,
    client: CaClient,
    /// The server has a runtime of its own, so that its connections end with it.
    running: Option<Runtime>,
}

/// What signs the server's own certificate.
fn serving_root() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl World {
    async fn new() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let ca = Arc::new(TestCa::new());
        let good = ca.clone();
        let scripted = Arc::new(Scripted {
            script: StdMutex::new(Arc::new(move |asked| Ok(good.answer(asked, LeafOptions::default())))),
            delay: StdMutex::default(),
            asked: StdMutex::default(),
        });
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), "first token\n").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = CaClient::new(CaSettings {
            address: format!("https://localhost:{}", address.port()),
            root: folder.path().join("root.pem"),
            server_name: Some("ca.test".into()),
            token: folder.path().join("token"),
            cluster_id: "c1".into(),
            ttl: Duration::from_secs(600),
            deadline: DEADLINE,
            ..CaSettings::default()
        })
        .unwrap();
        let mut world = Self {
            ca,
            scripted,
            folder,
            address,
            client,
            running: None,
        };
        world.serve(listener, "ca.test", true);
        world
    }

    /// Serves with a certificate of a new root, which the client is told of if `told`.
    fn serve(&mut self, listener: TcpListener, name: &str, told: bool) {
        let root = serving_root();
        let key = KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.subject_alt_names = vec![SanType::DnsName(name.try_into().unwrap())];
        let leaf = params.signed_by(&key, &root).unwrap();
        if told {
            fs::write(self.folder.path().join("root.pem"), root.pem()).unwrap();
        }
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(leaf.pem(), key.serialize_pem()));
        let service = IstioCertificateServiceServer::from_arc(self.scripted.clone());
        let server = Server::builder().tls_config(tls).unwrap().add_service(service);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        listener.set_nonblocking(true).unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap();
        });
        self.running = Some(runtime);
    }

    /// Ends the server as a process that is killed.
    fn kill(&mut self) {
        if let Some(runtime) = self.running.take() {
            runtime.shutdown_background();
        }
    }

    async fn restart(&mut self, name: &str, told: bool) {
        self.kill();
        let listener = loop {
            match TcpListener::bind(self.address) {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        self.serve(listener, name, told);
    }

    fn script(&self, script: impl Fn(&Asked) -> Result<Vec<String>, Status> + Send + Sync + 'static) {
        *self.scripted.script.lock().unwrap() = Arc::new(script);
    }

    async fn ask(&self) -> Result<Certificate, IssueError> {
        let issued = self.client.issue(&id("shop", "cart")).await;
        issued.map(|issued| issued.certificate)
    }

    fn asked(&self) -> Vec<Asked> {
        self.scripted.asked.lock().unwrap().clone()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kill();
    }
}

impl TestCa {
    fn answer(&self, asked: &Asked, options: LeafOptions) -> Vec<String> {
        self.sign(&SpiffeId::parse(&asked.identity).unwrap(), &asked.public_key, options)
    }
}

#[tokio::test]
async fn a_request_names_token_cluster_identity_and_lifetime_and_each_has_a_key_of_its_own() {
    let world = World::new().await;
    let first = world.ask().await.unwrap();
    fs::write(world.folder.path().join("token"), "second token").unwrap();
    let second = world.ask().await.unwrap();
    assert_ne!(first.serial(), second.serial());
    let asked = world.asked();
    assert_eq!(asked[0].token, "Bearer first token");
    assert_eq!(asked[1].token, "Bearer second token", "it is read each time");
    assert_ne!(asked[0].public_key, asked[1].public_key);
    assert_eq!(asked[0].peer, asked[1].peer, "one connection serves all");
    for one in asked {
        assert_eq!(one.identity, "spiffe://cluster.local/ns/shop/sa/cart");
        assert_eq!((one.cluster.as_str(), one.lifetime), ("c1", 600));
    }
}

#[tokio::test]
async fn what_the_ca_says_becomes_an_error_of_its_kind_with_its_words() {
    let world = World::new().await;
    for (status, outcome, says) in [
        (
            Status::unauthenticated("pod not known yet"),
            CallOutcome::Unauthenticated,
            "is it fresh",
        ),
        (
            Status::unauthenticated(ISTIOD_DENIES),
            CallOutcome::PermissionDenied,
            "does a pod of it run on this node",
        ),
        (
            Status::permission_denied("not on your node"),
            CallOutcome::PermissionDenied,
            "not on your node",
        ),
        (Status::unavailable("starting"), CallOutcome::Unavailable, "starting"),
        (Status::internal("bug"), CallOutcome::Unavailable, "bug"),
        (
            Status::resource_exhausted("20 a second"),
            CallOutcome::Busy,
            "20 a second",
        ),
        (Status::invalid_argument("bad CSR"), CallOutcome::Rejected, "bad CSR"),
        (Status::unimplemented(""), CallOutcome::Rejected, "not implemented"),
        (
            Status::deadline_exceeded("late"),
            CallOutcome::Deadline,
            "did not answer",
        ),
    ] {
        let code = status.code();
        world.script(move |_| Err(status.clone()));
        let error = world.ask().await.unwrap_err();
        assert_eq!(error.outcome(), outcome, "{code:?}");
        assert!(error.to_string().contains(says), "{error}");
    }
    world.script(|_| {
        Err(Status::unavailable(
            "line\nbreak\u{1b}[31m".to_owned() + &"x".repeat(2000),
        ))
    });
    let text = world.ask().await.unwrap_err().to_string();
    assert!(text.len() < 500 && !text.contains(char::is_control), "{text}");
}

#[tokio::test]
async fn no_answer_is_taken_that_is_not_exactly_what_was_asked_for() {
    let world = World::new().await;
    let (ca, other) = (world.ca.clone(), Arc::new(TestCa::new()));
    let now = SystemTime::now();
    let hour = Duration::from_secs(3600);
    let span = move |from: SystemTime, to: SystemTime| LeafOptions {
        not_before: from,
        not_after: to,
        ..LeafOptions::default()
    };
    type Case = (&'static str, Box<dyn Fn(&Asked) -> Vec<String> + Send + Sync>);
    let cases: Vec<Case> = vec![
        ("no certificate", Box::new(|_| Vec::new())),
        ("not a PEM certificate", Box::new(|_| vec!["garbage".into()])),
        (
            "not a PEM certificate",
            Box::new(|_| vec![String::new(), String::new()]),
        ),
        ("not an X.509 certificate", {
            let ca = ca.clone();
            Box::new(move |asked| {
                let mut chain = ca.answer(asked, LeafOptions::default());
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".clone_into(&mut chain[0]);
                chain
            })
        }),
        ("the certificate is spiffe://cluster.local/ns/shop/sa/admin's", {
            let ca = ca.clone();
            Box::new(move |asked| ca.sign(&id("shop", "admin"), &asked.public_key, LeafOptions::default()))
        }),
        ("another key", {
            let ca = ca.clone();
            Box::new(move |_| ca.issue(&id("shop", "cart")).0)
        }),
        ("does not lead to a root that is trusted", {
            let (ca, other) = (ca.clone(), other.clone());
            Box::new(move |asked| {
                let mut chain = ca.answer(asked, LeafOptions::default());
                *chain.last_mut().unwrap() = other.root_pem();
                chain
            })
        }),
        ("does not end in a root", {
            let ca = ca.clone();
            Box::new(move |asked| ca.answer(asked, LeafOptions::default())[..2].to_vec())
        }),
        ("has expired", {
            let ca = ca.clone();
            Box::new(move |asked| ca.answer(asked, span(now - hour, now - hour / 2)))
        }),
        ("not valid yet", {
            let ca = ca.clone();
            Box::new(move |asked| ca.answer(asked, span(now + hour, now + 2 * hour)))
        }),
        (
            "too long",
            Box::new(|_| vec!["-----BEGIN CERTIFICATE-----".into(); 100]),
        ),
        ("", Box::new(|_| vec!["x".repeat(5_000_000)])),
    ];
    for (says, answer) in cases {
        world.script(move |asked| Ok(answer(asked)));
        let error = world.ask().await.unwrap_err();
        assert_eq!(error.outcome(), CallOutcome::BadAnswer, "{error}");
        assert!(error.to_string().contains(says), "{says:?}: {error}");
        assert!(!error.is_outage());
    }
    // Short, but sound.
    world.script(move |asked| Ok(ca.answer(asked, span(now, now + Duration::from_secs(10)))));
    world.ask().await.unwrap();
}

#[tokio::test]
async fn an_answer_after_the_deadline_is_given_up_and_the_next_call_has_a_new_connection() {
    let world = World::new().await;
    world.ask().await.unwrap();
    *world.scripted.delay.lock().unwrap() = Duration::from_secs(60);
    let begin = Instant::now();
    let error = world.ask().await.unwrap_err();
    assert_eq!(error.outcome(), CallOutcome::Deadline, "{error}");
    assert!(begin.elapsed() < DEADLINE * 3, "{:?}", begin.elapsed());
    *world.scripted.delay.lock().unwrap() = Duration::ZERO;
    world.ask().await.unwrap();
    let asked = world.asked();
    assert_ne!(asked[0].peer, asked[2].peer);
}

#[tokio::test]
async fn a_server_that_is_killed_is_reached_again_when_it_is_back() {
    let mut world = World::new().await;
    world.ask().await.unwrap();
    world.kill();
    let error = loop {
        match world.ask().await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(error) => break error,
        }
    };
    assert!(error.is_outage(), "{error}");
    world.restart("ca.test", true).await;
    // It may take one call to notice.
    if world.ask().await.is_err() {
        world.ask().await.unwrap();
    }
}

#[tokio::test]
async fn a_serving_certificate_of_a_new_root_is_believed_as_soon_as_the_root_file_has_it_and_no_sooner() {
    let mut world = World::new().await;
    world.ask().await.unwrap();
    world.restart("ca.test", false).await;
    for _ in 0..2 {
        let error = world.ask().await.unwrap_err();
        assert!(error.is_outage(), "{error}");
    }
    let untrusted = world.ask().await.unwrap_err().to_string();
    assert!(untrusted.contains("certificate"), "the reason is said: {untrusted}");
    world.restart("ca.test", true).await;
    world.ask().await.unwrap();
    let before = world.asked().len();
    // The right root, but somebody else's name.
    world.restart("other.test", true).await;
    for _ in 0..2 {
        let error = world.ask().await.unwrap_err().to_string();
        assert!(
            error.contains("not valid for name") || error.contains("connection"),
            "{error}"
        );
    }
    assert_eq!(
        world.asked().len(),
        before,
        "nobody whom we do not know was told our token"
    );
}

#[tokio::test]
async fn files_that_are_missing_or_unusable_are_named() {
    let world = World::new().await;
    let token = world.folder.path().join("token");
    let huge = "x".repeat(20_000);
    for (content, says) in [
        (Some(""), "it is empty"),
        (Some("a\nb"), "characters that a header cannot carry"),
        (Some(huge.as_str()), "too large"),
        (None, "No such file"),
    ] {
        match content {
            Some(content) => fs::write(&token, content).unwrap(),
            None => fs::remove_file(&token).unwrap(),
        }
        let error = world.ask().await.unwrap_err();
        assert_eq!(error.outcome(), CallOutcome::Local);
        let text = error.to_string();
        assert!(text.contains(says) && text.contains("token"), "{text}");
        assert!(!text.contains("xxxx"), "a token is not shown");
    }
    fs::write(&token, "good").unwrap();
    let root = world.folder.path().join("root.pem");
    fs::write(&root, "garbage").unwrap();
    let error = world.ask().await.unwrap_err().to_string();
    assert!(!error.is_empty(), "{error}");
    assert_eq!(world.asked().len(), 0);
}

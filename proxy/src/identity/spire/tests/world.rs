//! An agent that says what a test wants, and a node that asks it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use super::super::proto::delegated_identity_server::{DelegatedIdentity, DelegatedIdentityServer};
use super::super::proto::{
    Selector, Spiffeid, SubscribeToX509BundlesRequest, SubscribeToX509BundlesResponse, SubscribeToX509sviDsRequest,
    SubscribeToX509sviDsResponse, X509svid, X509svidWithKey,
};
use super::super::{SpireAgent, SpireSettings};
use crate::identity::testing::{LeafOptions, TestCa, id};
use crate::identity::{SpiffeId, Trust, TrustDomain};

pub(super) const SOON: Duration = Duration::from_secs(5);
pub(super) const DEADLINE: Duration = Duration::from_millis(500);

/// What the agent says from now on, also to those who listen already.
#[derive(Clone)]
pub(super) enum Say<T> {
    Nothing,
    This(T),
    Refusal(Code, &'static str),
    GoodBye,
}

type Svids = SubscribeToX509sviDsResponse;
pub(super) type Told = SubscribeToX509BundlesResponse;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(super) struct Scripted {
    pub(super) svids: watch::Sender<Say<Svids>>,
    pub(super) bundles: watch::Sender<Say<Told>>,
    pub(super) asked: Mutex<Vec<Vec<Selector>>>,
}

fn answers<T: Clone + Send + Sync + 'static>(script: &watch::Sender<Say<T>>) -> Result<Answers<T>, Status> {
    let script = script.subscribe();
    if let Say::Refusal(code, text) = *script.borrow() {
        return Err(Status::new(code, text));
    }
    Ok(Box::pin(stream::unfold(Some((script, false)), |state| async {
        let (mut script, mut has_spoken) = state?;
        loop {
            if has_spoken {
                script.changed().await.ok()?;
            }
            let say = script.borrow_and_update().clone();
            has_spoken = true;
            match say {
                Say::Nothing => {}
                Say::This(answer) => return Some((Ok(answer), Some((script, true)))),
                Say::Refusal(code, text) => return Some((Err(Status::new(code, text)), None)),
                Say::GoodBye => return None,
            }
        }
    })))
}

#[tonic::async_trait]
impl DelegatedIdentity for Scripted {
    type SubscribeToX509SVIDsStream = Answers<Svids>;
    type SubscribeToX509BundlesStream = Answers<Told>;

    async fn subscribe_to_x509svi_ds(
        &self,
        request: Request<SubscribeToX509sviDsRequest>,
    ) -> Result<Response<Answers<Svids>>, Status> {
        self.asked.lock().unwrap().push(request.into_inner().selectors);
        answers(&self.svids).map(Response::new)
    }

    async fn subscribe_to_x509_bundles(
        &self,
        _: Request<SubscribeToX509BundlesRequest>,
    ) -> Result<Response<Answers<Told>>, Status> {
        answers(&self.bundles).map(Response::new)
    }
}

/// An agent with a CA behind it, and the trust of a node that asks it.
pub(super) struct World {
    pub(super) ca: TestCa,
    pub(super) scripted: Arc<Scripted>,
    folder: tempfile::TempDir,
    pub(super) trust: Trust,
    /// The agent has a runtime of its own, so that its connections end with it.
    running: Option<Runtime>,
}

impl World {
    pub(super) fn new() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let ca = TestCa::new();
        let scripted = Scripted {
            svids: watch::Sender::new(Say::This(svids([svid(&ca, &cart())]))),
            bundles: watch::Sender::new(Say::This(bundles(&[("cluster.local", &[&ca])]))),
            asked: Mutex::default(),
        };
        let mut world = Self {
            ca,
            scripted: Arc::new(scripted),
            folder: tempfile::tempdir().unwrap(),
            trust: Trust::default(),
            running: None,
        };
        world.start();
        world
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("admin.sock")
    }

    pub(super) fn start(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(self.socket()).unwrap()
        };
        let incoming = stream::unfold(listener, |listener| async {
            let accepted = listener.accept().await.map(|(stream, _)| stream);
            Some((accepted, listener))
        });
        let service = DelegatedIdentityServer::from_arc(Arc::clone(&self.scripted));
        runtime.spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        self.running = Some(runtime);
    }

    /// Ends the agent as a process that is killed, and takes its socket away.
    pub(super) fn kill(&mut self) {
        if let Some(runtime) = self.running.take() {
            runtime.shutdown_background();
        }
        let _ = std::fs::remove_file(self.socket());
    }

    pub(super) fn agent(&self) -> SpireAgent {
        let settings = SpireSettings {
            socket: self.socket().to_str().unwrap().to_owned(),
            home: TrustDomain::parse("cluster.local").unwrap(),
            deadline: DEADLINE,
        };
        SpireAgent::start(&settings, self.trust.clone()).unwrap()
    }

    pub(super) fn say(&self, answer: Svids) {
        self.scripted.svids.send_replace(Say::This(answer));
    }

    pub(super) fn say_bundles(&self, answer: Told) {
        self.scripted.bundles.send_replace(Say::This(answer));
    }

    /// The roots in force, each with its domain, ours first; a star marks one that is leaving.
    pub(super) fn roots(&self) -> Vec<String> {
        let roots = self.trust.status().roots.into_iter().filter(|root| root.in_force);
        let show = |root: crate::identity::RootStatus| {
            let domain = root.trust_domain.unwrap_or_else(|| "ours".to_owned());
            format!("{domain} {}{}", root.fingerprint, if root.leaving { "*" } else { "" })
        };
        roots.map(show).collect()
    }

    pub(super) async fn wait_for_roots(&self, expected: &[String]) {
        let there = async {
            while self.roots() != expected {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(SOON, there).await;
        assert!(waited.is_ok(), "{:?} are there, not {expected:?}", self.roots());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(super) fn cart() -> SpiffeId {
    id("shop", "cart")
}

pub(super) fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec()
}

pub(super) fn svid(ca: &TestCa, id: &SpiffeId) -> X509svidWithKey {
    svid_with(ca, id, LeafOptions::default())
}

pub(super) fn svid_with(ca: &TestCa, id: &SpiffeId, options: LeafOptions) -> X509svidWithKey {
    let (answer, key) = ca.issue_with(id, options);
    X509svidWithKey {
        x509_svid: Some(X509svid {
            cert_chain: answer[..2].iter().map(|pem| der(pem)).collect(),
            id: Some(Spiffeid {
                trust_domain: id.trust_domain().to_owned(),
                path: format!("/ns/{}/sa/{}", id.namespace(), id.service_account()),
            }),
        }),
        x509_svid_key: key.to_pkcs8(),
    }
}

pub(super) fn svids(all: impl IntoIterator<Item = X509svidWithKey>) -> Svids {
    Svids {
        x509_svids: all.into_iter().collect(),
    }
}

pub(super) fn bundles(domains: &[(&str, &[&TestCa])]) -> Told {
    let bundle = |(domain, authorities): &(&str, &[&TestCa])| {
        let roots: Vec<u8> = authorities.iter().flat_map(|ca| der(&ca.root_pem())).collect();
        (format!("spiffe://{domain}"), roots)
    };
    Told {
        ca_certificates: domains.iter().map(bundle).collect::<HashMap<_, _>>(),
    }
}

pub(super) fn root_of(ca: &TestCa) -> String {
    crate::identity::hex(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &der(&ca.root_pem())).as_ref())
}

//! `adit node`: the layers put together into a running proxy.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::admin_page::AdminPage;
use super::alarm;
use super::args::{AUTO, StartupMode};
use super::certificates::{fetch_certificates, first_certificate};
use super::drain::{Drain, StopSignals};
use super::handover::{Control, Predecessor, Standing, Turn};
use super::keep::{Keeper, Kept};
use super::memory;
use super::process::connections_per_pod;
use super::settings::{CertificateSource, NodeSettings};
use super::source::Source;
use super::values::BpfLog;
use crate::admin::{AdminState, Readiness, StateSections};
use crate::dataplane::{Dataplane, DataplaneSettings, DirectConnections, Verdicts, Workers};
use crate::hbone::HboneSettings;
use crate::identity::{
    CaClient, CaSettings, CertStore, CertificateFolder, Issuer, SpireAgent, SpireSettings, StoreSettings, Trust,
};
use crate::mesh::source::StatusHandle;
use crate::mesh::source::kubernetes::View;
use crate::mesh::source::kubernetes::events::{Event, Events, Regarding, Reporter};
use crate::mesh::{MeshHandle, Workload};
use crate::node::{self, Births, CaptureTests, Enrolment, LocalPods, Outcomes, PodStatus, Report};
use crate::steer::{
    self, DirectEnds, KubeletCgroup, KubeletSettings, LogScope, Prepared, Startup, SteerError, SteerSettings, Steering,
};
use crate::telemetry::{Telemetry, TelemetrySettings};

/// How long a captured connection that nobody accepts is remembered, at least.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How often it is looked whether pods or most connections have gone, whose memory the kernel then gets back.
const TRIM_EVERY: Duration = Duration::from_secs(5);
/// How often it is looked whether the kubelet has been started anew, and where it is not found, at the least.
const KUBELET_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How often it is looked whether ends of direct connections found no room in their ring.
const LATE_ENDS_EVERY: Duration = Duration::from_secs(1);
/// How often it is looked whether direct connections are gone that are told of as open.
const GONE_EVERY: Duration = Duration::from_secs(10);
/// How long the end waits for the last lines of the access log to be written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Runs the proxy of this node until it is told to stop and has drained.
pub async fn run(mut settings: NodeSettings) -> anyhow::Result<()> {
    let started = Instant::now();
    if settings.pods_cgroup.as_os_str() == AUTO {
        settings.pods_cgroup = steer::find_pods_cgroup()?;
        tracing::info!("the pods' cgroup is {}", settings.pods_cgroup.display());
    }
    let mut stop = StopSignals::install()?;
    let (readiness, standing) = (Readiness::new(), Arc::new(Standing::default()));
    let starting = readiness.pending("kernel programs and self-test");

    let turn = Turn::wait(&settings.run_dir).await?;
    let mut predecessor = Predecessor::find(&settings.run_dir).await?;
    if let Some(predecessor) = &predecessor {
        tracing::info!("to take over from {}", predecessor.name);
    }
    let source = Source::open(&settings.source, View::Node(settings.node_name.clone())).await?;
    let (mesh, source_status, synced) = (source.mesh(), source.status(), source.synced());
    mesh.set_aliases(settings.trust.aliases.clone());
    let status = source.client().map(PodStatus::new);
    let reporter = Reporter {
        controller: "mesh.adit/node",
        instance: settings.node_name.as_str().into(),
    };
    let events = source
        .client()
        .map_or_else(Events::silent, |client| Events::start(client, reporter));
    let trust = Trust::new(settings.trust.clone());
    if let Some(fault) = trust.without_distrust() {
        anyhow::bail!("the list of what is distrusted cannot be used, and without it nobody is trusted: {fault}");
    }
    tokio::spawn(trust.clone().follow());
    let certs = cert_store(&settings, &mesh, trust)?;
    let telemetry_settings = TelemetrySettings {
        access_log: settings.access_log,
        cluster_id: settings.cluster_id.clone(),
        ..TelemetrySettings::default()
    };
    let telemetry = Telemetry::new(telemetry_settings, Arc::new(certs.clone())).context("starting the access log")?;
    let (pods, outcomes) = (LocalPods::default(), Outcomes::default());
    telemetry.watch_pods(outcomes.clone());
    telemetry.watch_source(source_status.clone());
    let (quit, mut told_to_quit) = watch::channel(false);
    let state = AdminState {
        telemetry: Arc::clone(&telemetry),
        readiness: readiness.clone(),
        sections: Arc::new(sections(
            &mesh,
            &pods,
            &outcomes,
            &telemetry,
            source_status,
            certs.trust().clone(),
        )),
        quit: Arc::new(move || {
            quit.send_replace(true);
        }),
    };
    let admin = AdminPage::new(settings.admin, settings.metrics, state);
    if let Some(socket) = &settings.probe_socket {
        admin.answer_probes(socket)?;
    }
    // A predecessor has the admin page's address until it leaves.
    if predecessor.is_none() {
        admin.open().await?;
    }
    tokio::spawn(source.watch());
    // Pods stay as they are until it is known what they should be.
    let unread = readiness.pending("the state of the mesh");
    tokio::select! {
        () = synced.wait() => unread.done(),
        () = stop.wait() => return Ok(()),
    }

    let prepared = prepare_steering(&settings).await?;
    let (adopts, pods_cgroup) = (prepared.adopts(), settings.pods_cgroup.clone());
    if adopts {
        // Before anything is replaced that another process has put in place, and that works.
        let pods_cgroup = pods_cgroup.clone();
        spawn_blocking(move || node::isolated_self_test(&pods_cgroup)).await??;
    }
    let mut leases = Vec::new();
    if let Some(predecessor) = &mut predecessor {
        leases = fetch_certificates(&certs, &settings.node_name, &mesh)
            .await
            .with_context(|| format!("{} stays in charge", predecessor.name))?;
        predecessor.freeze().await?;
    }
    // Whoever told it to stop may have taken all away already, while it waited for its turn.
    if stop.have_come() {
        return Ok(());
    }
    let steering = spawn_blocking(move || -> Result<_, SteerError> {
        let steering = prepared.attach()?;
        if !adopts {
            node::self_test(&steering, &pods_cgroup)?;
        }
        Ok(Arc::new(steering))
    })
    .await??;
    if let Some(log) = steering.take_log() {
        tokio::spawn(steer::forward_logs(log));
    }
    let (drain, draining) = watch::channel(false);
    let (enrolled, enrolling) = watch::channel(true);
    let tests = CaptureTests::default();
    let plane = Arc::new(Dataplane {
        mesh: mesh.clone(),
        certs: certs.clone(),
        flows: steering.flows(),
        clients: steering.clients(),
        pods: pods.clone(),
        broken: Mutex::default(),
        tests: tests.clone(),
        carried: Arc::default(),
        no_place_logged: Mutex::default(),
        observer: telemetry.clone(),
        settings: DataplaneSettings {
            connect_timeout: settings.connect_timeout,
            connections_per_pod: connections_per_pod(settings.max_connections_per_pod),
            hbone: hbone_settings(&settings),
        },
        enrolling,
        draining,
        next_id: AtomicU64::new(1),
    });
    let workers = Arc::new(Workers::start(&plane, settings.workers).context("starting the workers")?);
    let enrolment = Enrolment::new(
        &settings.node_name,
        &settings.pods_cgroup,
        Arc::clone(&steering),
        certs.clone(),
        pods.clone(),
        workers.clone(),
        settings.workers,
    );

    // Pods before verdicts: what the kernel knows already holds until what is asked instead has listeners.
    let known = mesh.load();
    let enrolment = spawn_blocking(move || {
        let mut enrolment = enrolment;
        enrolment.reconcile(&known);
        enrolment
    })
    .await?;
    enrolled.send_replace(false);
    let direct = Arc::new(DirectConnections::new(Arc::clone(&plane), steering.open_direct()));
    telemetry.watch_direct(Arc::clone(&direct));
    let verdicts = Verdicts::take_over(steering.verdicts(), steering.services())?;
    telemetry.watch_unplaced(verdicts.unplaced());
    let (standings, followed) = watch::channel(Arc::default());
    let kept = Kept {
        enrolment,
        verdicts,
        direct: Arc::clone(&direct),
        pods: pods.clone(),
        telemetry: Arc::clone(&telemetry),
        standings,
        seen: None,
    };
    let (namespaces, born) = (steering.namespaces(), Arc::new(Notify::new()));
    telemetry.watch_startup(namespaces.clone());
    let births = {
        let (namespaces, mesh, born) = (namespaces.clone(), mesh.clone(), Arc::clone(&born));
        let (node, pods_cgroup) = (settings.node_name.clone(), settings.pods_cgroup.clone());
        spawn_blocking(move || Births::watch(&pods_cgroup, &namespaces, &node, mesh, born)).await??
    };
    let mut keeper = Keeper::new(kept, mesh.clone(), readiness.clone(), born);
    keeper.reconcile().await?;
    drop(leases);
    if let Some(predecessor) = predecessor {
        tracing::info!("taking over from {}", predecessor.name);
        // All is in place: what it thinks of it changes nothing.
        if let Err(error) = predecessor.drain().await {
            tracing::warn!("{error:#}");
        }
        admin.open_when_free();
    }
    let (wish, mut wishes) = mpsc::channel(1);
    tokio::spawn(Control::bind(&settings.run_dir, Arc::clone(&standing))?.serve(wish));
    drop(turn);
    // A predecessor has read it until now.
    let (ends, refusals) = (steering.direct_ends()?, steering.refusals()?);
    let reading = tokio::spawn(watch_direct(Arc::clone(&direct), ends, refusals));
    // Now that all that was there before is known.
    namespaces.set_startup(match settings.startup {
        StartupMode::Enforced => Startup::Enforced,
        StartupMode::Permissive => Startup::Permissive,
    })?;
    // A predecessor has followed them until now.
    let births = births.follow().context("starting the thread that watches births")?;
    let mut kubelet = KubeletKeeper {
        steering: Arc::clone(&steering),
        standing: Arc::clone(&standing),
        last_error: None,
    };
    kubelet.look();
    let kubelet = settings.kubelet_cgroup.is_some().then(|| tokio::spawn(kubelet.keep()));
    for pod in pods.all().values() {
        let (certs, id) = (certs.clone(), pod.identity().clone());
        if certs.try_get(&id).is_none() {
            let pending = readiness.pending(format!("certificate of {id}"));
            tokio::spawn(async move {
                first_certificate(&certs, &id).await;
                drop(pending);
            });
        }
    }
    tokio::spawn(alarm::watch(certs.clone(), settings.node_name.clone(), events.clone()));
    let complain = move |pod: &Workload, reason: &'static str, message: &str| {
        tracing::info!("pod {}/{}: {reason}: {message}", pod.namespace, pod.name);
        let regarding = Regarding::pod(&pod.namespace, &pod.name, &pod.uid);
        events.emit(Event::warning(regarding, reason, "Enrol", message.to_owned()));
    };
    let report = Report::new(tests, settings.pods_cgroup.clone(), status, Box::new(complain));
    let reporting = tokio::spawn(report.showing(outcomes).follow(followed));
    starting.done();
    let ready = readiness.clone();
    tokio::spawn(async move {
        ready.ready().await;
        tracing::info!("ready after {} ms", started.elapsed().as_millis());
        spawn_blocking(memory::forget_start);
    });

    let (flows, clients) = (steering.flows(), steering.clients());
    tokio::spawn(async move {
        let (mut seen_flows, mut seen_clients, mut due) = (HashSet::new(), HashSet::new(), interval(SWEEP_EVERY));
        loop {
            due.tick().await;
            for swept in [flows.sweep(&mut seen_flows), clients.sweep(&mut seen_clients)] {
                match swept {
                    Ok(0) => {}
                    Ok(count) => tracing::info!("removed {count} records of connections that nobody took"),
                    Err(error) => tracing::warn!("{error}"),
                }
            }
        }
    });
    let (watched, local) = (Arc::clone(&telemetry), pods.clone());
    tokio::spawn(async move {
        let (mut most, mut before, mut due) = (0, local.all(), interval(TRIM_EVERY));
        loop {
            due.tick().await;
            let (open, now) = (watched.open_connections(), local.all());
            let some_have_gone = before.keys().any(|uid| !now.contains_key(uid));
            if open * 2 < most || some_have_gone {
                spawn_blocking(memory::give_back_freed_memory);
                most = open;
            }
            (most, before) = (most.max(open), now);
        }
    });
    let superseded = tokio::select! {
        kept = keeper.keep(&mut wishes) => Some(kept?),
        () = stop.wait_for_good(&standing, settings.await_successor) => None,
        _ = told_to_quit.wait_for(|quit| *quit) => None,
    };
    let told = standing.is_told_to_stop();
    standing.tell_to_stop();
    let _draining = readiness.pending("draining");
    let workers_drain = Drain {
        started: drain,
        deadline: settings.drain_deadline,
        telemetry: &telemetry,
    };
    // A successor reads these from then on, and tells how pods stand.
    let let_go = async move {
        reading.abort();
        reporting.abort();
        if let Some(kubelet) = kubelet {
            kubelet.abort();
        }
        // A thread that has panicked has ended too.
        let _ = spawn_blocking(move || births.stop()).await;
    };
    match superseded {
        None => workers_drain.after_stop(&mut stop, &mut wishes, &admin, let_go).await,
        Some(leave) => {
            admin.close();
            let_go.await;
            // The successor waits for this word, and for the address.
            let _ = leave.send(());
            workers_drain.after_handover(&mut stop, told, &mut keeper).await;
        }
    }
    workers.stop(telemetry.open_connections() == 0);
    telemetry.flush(LAST_LINES);
    Ok(())
}

/// Follows what the kernel tells of direct connections and refusals, and looks for what it could not tell.
async fn watch_direct(direct: Arc<DirectConnections>, ends: DirectEnds, refusals: DirectEnds) {
    let told = async {
        let ends = ends.follow(|end| direct.ended(end));
        let refusals = refusals.follow(|refusal| direct.ended(refusal));
        if let Err(error) = tokio::try_join!(ends, refusals) {
            tracing::error!("reading the ends of direct connections: {error}; they are no longer logged and counted");
        }
    };
    let missed = async {
        let (mut late, mut gone) = (interval(LATE_ENDS_EVERY), interval(GONE_EVERY));
        for due in [&mut late, &mut gone] {
            due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        loop {
            let direct = Arc::clone(&direct);
            let looked = tokio::select! {
                _ = late.tick() => spawn_blocking(move || direct.catch_up()).await,
                _ = gone.tick() => spawn_blocking(move || {
                    direct.log_untold_refusals()?;
                    direct.close_gone()
                }).await,
            };
            match looked {
                Ok(Ok(0)) | Err(_) => {}
                Ok(Ok(count)) => tracing::info!("{count} ends of direct connections were told late or not at all"),
                Ok(Err(error)) => tracing::warn!("{error}; ends of direct connections may be missing"),
            }
        }
    };
    tokio::join!(told, missed);
}

async fn prepare_steering(settings: &NodeSettings) -> anyhow::Result<Prepared> {
    let log = match &settings.bpf_log {
        BpfLog::None => LogScope::None,
        BpfLog::All => LogScope::All,
        BpfLog::Pod(pod) => LogScope::Pod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
        },
    };
    let steer_settings = SteerSettings {
        pods_cgroup: settings.pods_cgroup.clone(),
        kubelet: kubelet_settings(settings)?,
        bpf_dir: settings.bpf_dir.clone(),
        layout: settings.layout,
        map_entries: settings.map_entries.clone(),
        log,
    };
    Ok(spawn_blocking(move || Prepared::new(&steer_settings)).await??)
}

fn kubelet_settings(settings: &NodeSettings) -> anyhow::Result<Option<KubeletSettings>> {
    let Some(cgroup) = settings.kubelet_cgroup.clone() else {
        return Ok(None);
    };
    let is_auto = cgroup.as_os_str() == AUTO;
    Ok(Some(KubeletSettings {
        cgroup: if is_auto {
            KubeletCgroup::OfProcess(settings.pods_cgroup.clone())
        } else {
            KubeletCgroup::At(cgroup)
        },
        command: settings.kubelet_command.clone(),
        netns: node::own_netns_cookie()?,
    }))
}

/// Keeps the programs on the kubelet's cgroup, which is another one each time it is started.
struct KubeletKeeper {
    steering: Arc<Steering>,
    standing: Arc<Standing>,
    last_error: Option<String>,
}

impl KubeletKeeper {
    fn look(&mut self) {
        let error = match self.steering.keep_kubelet() {
            Ok(true) => {
                tracing::info!("the kubelet's probes reach enrolled pods");
                None
            }
            Ok(false) => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(text) = error.as_ref().filter(|_| error != self.last_error) {
            tracing::warn!("{text}; until then its probes are decided on as any plaintext peer");
        }
        self.last_error = error;
    }

    async fn keep(mut self) {
        let mut pause = KUBELET_EVERY.0;
        loop {
            sleep(pause).await;
            if !self.standing.is_frozen() {
                self.look();
            }
            // To look for one takes the longest where there is none.
            pause = match &self.last_error {
                None => KUBELET_EVERY.0,
                Some(_) => (pause * 2).min(KUBELET_EVERY.1),
            };
        }
    }
}

fn cert_store(settings: &NodeSettings, mesh: &MeshHandle, trust: Trust) -> anyhow::Result<CertStore> {
    let issuer: Arc<dyn Issuer> = match &settings.certificates {
        CertificateSource::Folder(folder) => Arc::new(CertificateFolder::new(folder.clone())),
        CertificateSource::Spire(socket) => {
            let spire = SpireSettings {
                socket: socket.clone(),
                home: mesh.load().trust_domain().clone(),
                deadline: SpireSettings::DEADLINE,
            };
            Arc::new(SpireAgent::start(&spire, trust.clone())?)
        }
        CertificateSource::Authority(ca) => Arc::new(CaClient::new(CaSettings {
            address: ca.address.clone(),
            root: ca.root.clone(),
            server_name: ca.server_name.clone(),
            token: ca.token.clone(),
            cluster_id: settings.cluster_id.clone(),
            ttl: ca.certificate_ttl,
            ..CaSettings::default()
        })?),
    };
    let store = StoreSettings {
        wait: settings.identity_wait,
        trust,
        ..StoreSettings::default()
    };
    Ok(CertStore::new(issuer, store))
}

fn hbone_settings(settings: &NodeSettings) -> HboneSettings {
    HboneSettings {
        stream_window: settings.stream_window,
        connection_window: settings.connection_window,
        max_streams: settings.max_streams,
        handshake_timeout: settings.handshake_timeout,
        request_timeout: settings.connect_timeout + settings.handshake_timeout,
        ..HboneSettings::default()
    }
}

/// The parts of `/debug/state`.
fn sections(
    mesh: &MeshHandle,
    pods: &LocalPods,
    outcomes: &Outcomes,
    telemetry: &Arc<Telemetry>,
    source: StatusHandle,
    trust: Trust,
) -> StateSections {
    let (for_services, for_policies, pods, outcomes) = (mesh.clone(), mesh.clone(), pods.clone(), outcomes.clone());
    let (for_certificates, for_connections) = (Arc::clone(telemetry), Arc::clone(telemetry));
    StateSections::default()
        .with("version", || Value::from(super::version()))
        .with("source", move || {
            let status = source.load();
            json!({
                "generation": status.generation,
                "last_error": status.last_error,
                "heard_seconds_ago": status.heard.map(|heard| heard.elapsed().as_secs()),
            })
        })
        .with("pods", move || {
            pods.all()
                .values()
                .map(|pod| json!({ "workload": pod.workload(), "netns_cookie": pod.netns().cookie() }))
                .collect()
        })
        .with("capture", move || json!(outcomes.all()))
        .with("certificates", move || for_certificates.certificates())
        .with("trust", move || json!(trust.status()))
        .with("services", move || {
            for_services.load().services().map(|service| json!(service)).collect()
        })
        .with("policies", move || {
            for_policies
                .load()
                .policies()
                .iter()
                .map(|policy| json!(policy))
                .collect()
        })
        .with("connections", move || for_connections.live_connections())
}

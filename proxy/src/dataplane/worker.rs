//! The threads that carry connections.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

use super::accept::{Drain, accept_all};
use super::standing::Standing;
use super::{Dataplane, inbound, outbound};
use crate::hbone::{HboneSettings, Pool};
use crate::node::{LocalPod, PodListeners, PodServer};

/// How long tunnels may take to send what they hold, once all connections have ended.
const FLUSH: Duration = Duration::from_secs(1);
const FLUSH_POLL: Duration = Duration::from_millis(2);

/// What a worker's connections share.
pub(super) struct Worker {
    pub(super) plane: Arc<Dataplane>,
    pub(super) pool: Rc<Pool>,
    pub(super) hbone: Rc<HboneSettings>,
    pub(super) rng: RefCell<fastrand::Rng>,
    pub(super) standing: Standing,
}

enum Command {
    /// Serve these listeners, and none that the pod had before.
    Listen(Arc<LocalPod>, PodListeners),
    /// Take nothing more of the pod; what is open goes on.
    Retire(Arc<str>),
    Remove(Arc<str>),
    /// End; first, if so, let tunnels send what they hold.
    Stop {
        flush: bool,
    },
}

/// What is done for a pod.
#[derive(Default)]
struct Served {
    tasks: JoinSet<()>,
    /// Whether nothing more is to be taken by the listeners that it has at present.
    retire: watch::Sender<bool>,
}

impl Served {
    /// Takes nothing more by the listeners that the pod has; those to come are told apart.
    fn retire(&mut self) {
        self.retire.send_replace(true);
        self.retire = watch::Sender::new(false);
        // What has ended by itself.
        while self.tasks.try_join_next().is_some() {}
    }
}

/// The workers.
pub struct Workers {
    plane: Arc<Dataplane>,
    commands: Vec<mpsc::UnboundedSender<Command>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Workers {
    /// Starts `count` workers.
    pub fn start(plane: &Arc<Dataplane>, count: usize) -> io::Result<Self> {
        let mut workers = Self {
            plane: Arc::clone(plane),
            commands: Vec::new(),
            threads: Mutex::default(),
        };
        for number in 0..count {
            let (commands, received) = mpsc::unbounded_channel();
            let plane = Arc::clone(plane);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let thread = thread::Builder::new()
                .name(format!("adit-worker-{number}"))
                .spawn(move || LocalSet::new().block_on(&runtime, run(plane, received)))?;
            workers.commands.push(commands);
            workers
                .threads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(thread);
        }
        Ok(workers)
    }

    /// Ends the workers' connections, each with a reset, and waits for the threads. With `flush`, which is for a drain
    /// that has come to its end, tunnels first get a moment to send what they still hold of streams that have ended.
    pub fn stop(&self, flush: bool) {
        for worker in &self.commands {
            // One that has ended has stopped.
            let _ = worker.send(Command::Stop { flush });
        }
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker has panicked");
            }
        }
    }
}

impl PodServer for Workers {
    fn listening(&self, pod: &Arc<LocalPod>, listeners: Vec<PodListeners>) {
        for (worker, listeners) in self.commands.iter().zip(listeners) {
            if worker.send(Command::Listen(Arc::clone(pod), listeners)).is_err() {
                tracing::error!("a worker has ended; pod {} is not served", pod.uid());
            }
        }
    }

    fn take_broken(&self) -> HashSet<Arc<str>> {
        std::mem::take(&mut self.plane.broken.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn retired(&self, uid: &str) {
        for worker in &self.commands {
            // A worker that has ended serves nothing any more.
            let _ = worker.send(Command::Retire(uid.into()));
        }
    }

    fn removed(&self, uid: &str) {
        for worker in &self.commands {
            // A worker that has ended serves nothing any more.
            let _ = worker.send(Command::Remove(uid.into()));
        }
    }
}

async fn run(plane: Arc<Dataplane>, mut commands: mpsc::UnboundedReceiver<Command>) {
    let worker = Rc::new(Worker {
        hbone: Rc::new(plane.settings.hbone.clone()),
        plane,
        pool: Rc::default(),
        rng: RefCell::new(fastrand::Rng::new()),
        standing: Standing::default(),
    });
    let mut pods: HashMap<Arc<str>, Served> = HashMap::new();
    let mut generations = worker.plane.mesh.subscribe();
    let mut seen = worker.plane.mesh.load();
    let mut draining = worker.plane.draining.clone();
    let mut drained = false;
    let mut distrusted = worker.plane.certs.trust().changes();
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Listen(pod, listeners)) => {
                    let served = pods.entry(Arc::clone(pod.uid())).or_default();
                    served.retire();
                    if let Err(error) = serve(&worker, &pod, listeners, served) {
                        tracing::error!("pod {} is not served: {error}", pod.uid());
                    }
                }
                Some(Command::Retire(uid)) => {
                    pods.entry(Arc::clone(&uid)).or_default().retire();
                    worker.pool.forget_source(&uid);
                }
                Some(Command::Remove(uid)) => {
                    pods.remove(&uid);
                    worker.pool.forget_source(&uid);
                }
                Some(Command::Stop { flush: true }) => {
                    // Too long a goodbye is cut short.
                    let _ = timeout(FLUSH, flush(&worker, &mut pods)).await;
                    return;
                }
                Some(Command::Stop { flush: false }) | None => return,
            },
            Ok(()) = generations.changed() => {
                let mesh = worker.plane.mesh.load();
                let changes = mesh.changes_since(&seen);
                if changes.has_lost_workloads() {
                    worker.pool.retain_destinations(|uid| mesh.workload_by_uid(uid).is_some());
                }
                // What is decided here is decided for pods of this node.
                if changes.policies || changes.uids().any(|uid| worker.plane.pods.get(uid).is_some()) {
                    worker.standing.review(&mesh).await;
                }
                seen = mesh;
            }
            Ok(()) = distrusted.changed() => worker.standing.review_identities().await,
            Ok(_) = draining.wait_for(|draining| *draining), if !drained => {
                drained = true;
                worker.pool.retire_all();
            }
        }
    }
}

/// Waits for the tunnels to end: the servers' with the pods' tasks, the clients' as they let go of the settings.
async fn flush(worker: &Worker, pods: &mut HashMap<Arc<str>, Served>) {
    worker.pool.retire_all();
    for served in pods.values_mut() {
        while served.tasks.join_next().await.is_some() {}
    }
    while Rc::strong_count(&worker.hbone) > 1 {
        sleep(FLUSH_POLL).await;
    }
}

fn serve(worker: &Rc<Worker>, pod: &Arc<LocalPod>, listeners: PodListeners, served: &mut Served) -> io::Result<()> {
    let [captured, hbone, plaintext] =
        [listeners.outbound, listeners.hbone, listeners.plaintext].map(TcpListener::from_std);
    let drain = || Drain {
        process: worker.plane.draining.clone(),
        pod: served.retire.subscribe(),
    };
    let (w, p) = (Rc::clone(worker), Arc::clone(pod));
    served
        .tasks
        .spawn_local(accept_all(w, p, captured?, drain(), |w, p, tcp, from, _| {
            outbound::serve(w, p, tcp, from)
        }));
    let (w, p) = (Rc::clone(worker), Arc::clone(pod));
    served
        .tasks
        .spawn_local(accept_all(w, p, hbone?, drain(), inbound::serve_tunnel));
    let (w, p) = (Rc::clone(worker), Arc::clone(pod));
    served
        .tasks
        .spawn_local(accept_all(w, p, plaintext?, drain(), |w, p, tcp, from, _| {
            inbound::serve_plaintext(w, p, tcp, from)
        }));
    Ok(())
}

//! Faults that a real API server cannot be made to show when wanted, by one that does as it is told.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use bytes::Bytes;
use kube::Config;
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::*;
use crate::mesh::source::kubernetes::wire;
use crate::mesh::source::{SourceStatus, StatusHandle};

/// What the server answers to one request.
enum Answer {
    /// This status and body.
    Whole(u16, Vec<u8>),
    /// These pieces, apart from each other, and then the end.
    Pieces(Vec<Vec<u8>>),
    /// Nothing more, ever.
    Hang(Vec<u8>),
}

/// A server of that many answers; later requests find it gone.
struct Server {
    client: Client,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start(answers: Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        tokio::spawn(async move {
            let mut answers = VecDeque::from(answers);
            while let Some(answer) = answers.pop_front() {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(socket.read_u8().await.unwrap());
                }
                let line = String::from_utf8(request).unwrap().lines().next().unwrap().to_owned();
                log.lock().unwrap().push(line);
                let status = if let Answer::Whole(status, _) = &answer {
                    *status
                } else {
                    200
                };
                let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\n\r\n");
                socket.write_all(head.as_bytes()).await.unwrap();
                match answer {
                    Answer::Whole(_, body) => socket.write_all(&body).await.unwrap(),
                    Answer::Pieces(pieces) => {
                        for piece in pieces {
                            socket.write_all(&piece).await.unwrap();
                            sleep(Duration::from_millis(10)).await;
                        }
                    }
                    Answer::Hang(bytes) => {
                        socket.write_all(&bytes).await.unwrap();
                        tokio::spawn(async move {
                            sleep(Duration::from_secs(3600)).await;
                            drop(socket);
                        });
                    }
                }
            }
        });
        let mut config = Config::new(format!("http://{address}").parse().unwrap());
        config.default_retry = false;
        Self {
            client: Client::try_from(config).unwrap(),
            asked,
        }
    }

    /// The paths and queries asked for, without what is at random.
    fn asked(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap();
        let query = |line: &String| {
            line.split(' ')
                .nth(1)
                .unwrap()
                .split("&timeoutSeconds")
                .next()
                .unwrap()
                .to_owned()
        };
        asked.iter().map(query).collect()
    }

    fn follow(&self, kind: Kind) -> (mpsc::Receiver<Event>, StatusHandle) {
        self.follow_with(kind, |_| {})
    }

    fn follow_with(&self, kind: Kind, change: impl FnOnce(&mut Follower)) -> (mpsc::Receiver<Event>, StatusHandle) {
        let (events, heard) = mpsc::channel(64);
        let status = StatusHandle::new(SourceStatus {
            last_loaded: SystemTime::now(),
            generation: 1,
            last_error: None,
            heard: None,
        });
        let mut follower = Follower::new(self.client.clone(), kind, events, Health::new(Some(status.clone())));
        change(&mut follower);
        tokio::spawn(follower.run());
        (heard, status)
    }
}

#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

fn sealed(raw: Vec<u8>) -> Vec<u8> {
    [b"k8s\0".to_vec(), Envelope { raw }.encode_to_vec()].concat()
}

fn namespace(version: &str) -> Vec<u8> {
    let metadata = wire::Version {
        resource_version: Bytes::copy_from_slice(version.as_bytes()),
    };
    wire::Versioned {
        metadata: Some(metadata),
    }
    .encode_to_vec()
}

fn page(versions: &[&str], of: &str, rest: &str) -> Answer {
    let list = wire::List {
        metadata: Some(wire::ListMeta {
            resource_version: of.to_owned(),
            r#continue: rest.to_owned(),
        }),
        items: versions.iter().map(|version| namespace(version).into()).collect(),
    };
    Answer::Whole(200, sealed(list.encode_to_vec()))
}

fn frame(kind: &'static str, raw: Vec<u8>) -> Vec<u8> {
    let event = wire::WatchEvent {
        r#type: kind.into(),
        object: Some(wire::RawExtension {
            raw: sealed(raw).into(),
        }),
    };
    let event = event.encode_to_vec();
    [(event.len() as u32).to_be_bytes().to_vec(), event].concat()
}

fn expired() -> Vec<u8> {
    let status = wire::Status {
        message: "too old resource version".to_owned(),
        code: 410,
    };
    frame("ERROR", status.encode_to_vec())
}

fn set(versions: &[&str]) -> Event {
    let objects = versions
        .iter()
        .map(|version| Object::Protobuf(namespace(version).into()));
    Event::Set(Kind::Namespaces, objects.collect())
}

async fn next(heard: &mut mpsc::Receiver<Event>) -> Event {
    timeout(Duration::from_secs(10), heard.recv())
        .await
        .expect("nothing is told")
        .expect("the follower has ended")
}

async fn expect(heard: &mut mpsc::Receiver<Event>, events: Vec<Event>) {
    for event in events {
        assert_eq!(next(heard).await, event);
    }
}

const LIST: &str = "/api/v1/namespaces?limit=500";

fn watch_from(version: &str) -> String {
    format!("/api/v1/namespaces?watch=1&allowWatchBookmarks=true&resourceVersion={version}")
}

#[tokio::test]
async fn a_list_in_pages_is_followed_by_watches_each_from_where_the_last_one_ended() {
    let bookmark = frame("BOOKMARK", namespace("9"));
    let server = Server::start(vec![
        page(&["1", "2"], "5", "rest"),
        page(&["3"], "5", ""),
        Answer::Whole(200, frame("ADDED", namespace("6"))),
        Answer::Whole(200, [frame("DELETED", namespace("7")), bookmark].concat()),
        Answer::Hang(Vec::new()),
    ])
    .await;
    let (mut heard, _) = server.follow(Kind::Namespaces);
    let gone = Event::Gone(Kind::Namespaces, Object::Protobuf(namespace("7").into()));
    expect(
        &mut heard,
        vec![
            Event::ListBegins(Kind::Namespaces),
            set(&["1", "2"]),
            set(&["3"]),
            Event::ListEnds(Kind::Namespaces),
            set(&["6"]),
            gone,
        ],
    )
    .await;
    while server.asked().len() < 5 {
        sleep(Duration::from_millis(10)).await;
    }
    let rest = format!("{LIST}&continue=rest");
    assert_eq!(
        server.asked(),
        [LIST.to_owned(), rest, watch_from("5"), watch_from("6"), watch_from("9")]
    );
}

#[tokio::test]
async fn what_is_too_old_is_listed_anew() {
    let server = Server::start(vec![
        page(&["1"], "1", ""),
        Answer::Whole(200, expired()),
        page(&["8"], "8", ""),
        // Older servers say so at once.
        Answer::Whole(410, Vec::new()),
        page(&["9"], "9", ""),
        Answer::Hang(Vec::new()),
    ])
    .await;
    let (mut heard, _) = server.follow(Kind::Namespaces);
    for version in ["1", "8", "9"] {
        let whole = [
            Event::ListBegins(Kind::Namespaces),
            set(&[version]),
            Event::ListEnds(Kind::Namespaces),
        ];
        expect(&mut heard, whole.into()).await;
    }
}

#[tokio::test]
async fn a_page_that_fails_begins_the_list_anew() {
    let server = Server::start(vec![
        page(&["1"], "5", "rest"),
        Answer::Whole(410, Vec::new()),
        page(&["2"], "6", ""),
        Answer::Hang(Vec::new()),
    ])
    .await;
    let (mut heard, _) = server.follow(Kind::Namespaces);
    expect(
        &mut heard,
        vec![
            Event::ListBegins(Kind::Namespaces),
            set(&["1"]),
            Event::ListBegins(Kind::Namespaces),
            set(&["2"]),
            Event::ListEnds(Kind::Namespaces),
        ],
    )
    .await;
}

#[tokio::test]
async fn a_watch_in_pieces_is_put_together_and_one_that_breaks_off_goes_on_from_what_was_whole() {
    let whole = [frame("ADDED", namespace("2")), frame("MODIFIED", namespace("3"))].concat();
    let pieces: Vec<Vec<u8>> = whole.chunks(7).map(<[u8]>::to_vec).collect();
    let cut = pieces[..pieces.len() - 1].to_vec();
    let server = Server::start(vec![
        page(&[], "1", ""),
        Answer::Pieces(cut),
        Answer::Pieces(pieces),
        Answer::Hang(Vec::new()),
    ])
    .await;
    let (mut heard, _) = server.follow(Kind::Namespaces);
    expect(
        &mut heard,
        vec![
            Event::ListBegins(Kind::Namespaces),
            set(&[]),
            Event::ListEnds(Kind::Namespaces),
            set(&["2"]),
            set(&["2"]),
            set(&["3"]),
        ],
    )
    .await;
    assert_eq!(server.asked()[1..3], [watch_from("1"), watch_from("2")]);
}

#[tokio::test]
async fn failures_are_told_until_it_goes_on() {
    let status = wire::Status {
        message: "etcd is away".to_owned(),
        code: 500,
    };
    let server = Server::start(vec![
        Answer::Whole(500, sealed(status.encode_to_vec())),
        Answer::Whole(200, b"{}".to_vec()),
        page(&[], "1", ""),
        Answer::Hang(frame("BOOKMARK", namespace("1"))),
    ])
    .await;
    let (mut heard, status) = server.follow(Kind::Namespaces);
    let mut errors = Vec::new();
    while heard.is_empty() {
        let error = status.load().last_error;
        if error.is_some() && errors.last() != error.as_ref() {
            errors.extend(error);
        }
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(
        errors,
        [
            "listing namespaces: the API server answers 500: etcd is away",
            "listing namespaces: not in the API's protobuf encoding",
        ]
    );
    expect(&mut heard, vec![Event::ListBegins(Kind::Namespaces)]).await;
    let well = async {
        while status.load().last_error.is_some() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(5), well).await.unwrap();
}

#[tokio::test]
async fn a_kind_that_the_cluster_does_not_have_has_no_objects() {
    let server = Server::start(vec![Answer::Whole(404, b"404 page not found\n".to_vec())]).await;
    let (mut heard, status) = server.follow(Kind::PeerAuthentications);
    let none = [
        Event::ListBegins(Kind::PeerAuthentications),
        Event::ListEnds(Kind::PeerAuthentications),
    ];
    expect(&mut heard, none.into()).await;
    assert_eq!(status.load().last_error, None);
}

#[tokio::test]
async fn a_kind_that_was_there_is_not_taken_to_be_gone_at_once() {
    let list = br#"{"kind":"PeerAuthenticationList","metadata":{"resourceVersion":"3"},"items":[{"metadata":{"name":"a","resourceVersion":"2"}}]}"#;
    let server = Server::start(vec![
        Answer::Whole(200, list.to_vec()),
        Answer::Whole(200, b"{\"type\":\"ERROR\",\"object\":{\"code\":410}}\n".to_vec()),
        Answer::Whole(404, Vec::new()),
    ])
    .await;
    let (mut heard, status) = server.follow(Kind::PeerAuthentications);
    for _ in 0..3 {
        next(&mut heard).await;
    }
    while server.asked().len() < 3 {
        sleep(Duration::from_millis(10)).await;
    }
    sleep(Duration::from_millis(200)).await;
    assert!(heard.is_empty(), "its objects are gone");
    assert!(status.load().last_error.is_some());
}

async fn expect_whole(heard: &mut mpsc::Receiver<Event>, versions: &[&str]) {
    let whole = [
        Event::ListBegins(Kind::Namespaces),
        set(versions),
        Event::ListEnds(Kind::Namespaces),
    ];
    expect(heard, whole.into()).await;
}

#[tokio::test]
async fn watches_that_end_at_once_and_in_order_are_made_again_but_not_in_a_hurry() {
    let ends = || Answer::Whole(200, Vec::new());
    let server = Server::start(vec![
        page(&[], "1", ""),
        ends(),
        ends(),
        ends(),
        Answer::Whole(200, frame("ADDED", namespace("2"))),
        Answer::Hang(Vec::new()),
    ])
    .await;
    let (mut heard, status) = server.follow(Kind::Namespaces);
    expect_whole(&mut heard, &[]).await;
    let begin = Instant::now();
    expect(&mut heard, vec![set(&["2"])]).await;
    // Half of 0.2, 0.4 and 0.8 s, or more.
    assert!(begin.elapsed() >= Duration::from_millis(700), "{:?}", begin.elapsed());
    // Nothing was missed, and nothing listed again.
    assert_eq!(server.asked()[1..5], vec![watch_from("1"); 4]);
    assert_eq!(status.load().last_error, None, "an end is no error");
}

#[tokio::test]
async fn a_watch_on_which_nothing_is_heard_is_given_up_and_goes_on_from_what_it_told_last() {
    let server = Server::start(vec![
        page(&[], "1", ""),
        // As over a connection whose other end has gone without a word.
        Answer::Hang(frame("BOOKMARK", namespace("5"))),
        Answer::Hang(frame("ADDED", namespace("6"))),
    ])
    .await;
    let silence = Duration::from_millis(1200);
    let (mut heard, status) = server.follow_with(Kind::Namespaces, |follower| follower.silence = silence);
    expect_whole(&mut heard, &[]).await;
    let (begin, mut oldest, mut error) = (Instant::now(), Duration::ZERO, None);
    while heard.is_empty() {
        let status = status.load();
        oldest = oldest.max(status.heard.unwrap().elapsed());
        error = error.or(status.last_error);
        assert!(begin.elapsed() < Duration::from_secs(10), "nothing is heard again");
        sleep(Duration::from_millis(5)).await;
    }
    expect(&mut heard, vec![set(&["6"])]).await;
    assert!(error.is_some_and(|error| error.contains("watching namespaces")));
    assert!(begin.elapsed() >= silence && oldest >= silence, "{oldest:?}");
    assert!(
        status.load().heard.unwrap().elapsed() < silence,
        "it was heard of again"
    );
    assert_eq!(server.asked()[1..3], [watch_from("1"), watch_from("5")]);
}

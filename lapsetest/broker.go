package lapsetest

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// brokerName is the name of the one broker in every route.
const brokerName = "lapsetest"

// Limits of RocketMQ 5.5.0 in its default configuration.
const (
	maxBodySize       = 4 << 20          // maxMessageSize of the proxy
	maxPropertySize   = 16 << 10         // maxUserPropertySize: properties, tag and keys together
	maxProperties     = 128              // userPropertyMaxNum
	maxBatch          = 32               // a larger Receive counts as this, silently
	minInvisible      = 10 * time.Second // for Receive; ChangeInvisibleDuration has no minimum
	maxInvisible      = 12 * time.Hour
	nackTime          = time.Second // for what nobody was there to take
	minPoll           = 5 * time.Second
	maxPoll           = 20 * time.Second
	defaultMaxDelay   = 24 * time.Hour         // maxDelayTimeMills of the proxy
	defaultPrecision  = 100 * time.Millisecond // what lapse ships; RocketMQ's own default is 1 s
	maxRequestBytes   = 64 << 20
	portReuseTimeout  = 5 * time.Second // how long Resume waits for its port
	portReuseInterval = 10 * time.Millisecond
)

// TopicType says which messages a topic takes. The values are those of the
// attribute message.type of a real topic.
type TopicType string

// The types of topics. A timed message is taken by a topic of type Delay only, and
// that takes no other.
const (
	Normal      TopicType = "NORMAL"
	Delay       TopicType = "DELAY"
	FIFO        TopicType = "FIFO"
	Transaction TopicType = "TRANSACTION"
	Unspecified TopicType = "UNSPECIFIED"
)

func (t TopicType) messageType() v2.MessageType {
	switch t {
	case Normal:
		return v2.MessageType_NORMAL
	case Delay:
		return v2.MessageType_DELAY
	case FIFO:
		return v2.MessageType_FIFO
	case Transaction:
		return v2.MessageType_TRANSACTION
	default:
		return v2.MessageType_MESSAGE_TYPE_UNSPECIFIED
	}
}

// Option changes what New or Start would do by default.
type Option func(*options)

type options struct {
	clock         *Clock
	precision     time.Duration
	maxDelay      time.Duration
	pollLimit     time.Duration
	lag           time.Duration
	routeCache    time.Duration
	sendAttempts  int
	ghostPolls    bool
	recall        bool
	tls           bool
	accessKey     string
	secretKey     string
	listenAddress string
}

// WithClock makes the Broker follow c. Default: real time.
func WithClock(c *Clock) Option { return func(o *options) { o.clock = c } }

// WithPrecision sets the timer's precision, to whose multiples since the Unix
// epoch deadlines are rounded up (timerPrecisionMs). Default: 100 ms.
func WithPrecision(p time.Duration) Option { return func(o *options) { o.precision = p } }

// WithMaxDelay sets how far ahead a deadline may lie before it is refused with
// 40012; zero or less means no limit (maxDelayTimeMills). Default: 24 h.
func WithMaxDelay(d time.Duration) Option { return func(o *options) { o.maxDelay = d } }

// WithPollLimit ends every Receive that found nothing after d of real time at the
// latest. The real proxy polls for 5 to 20 s, according to the request's deadline;
// a shorter limit makes for shorter tests. Default: none of its own.
func WithPollLimit(d time.Duration) Option { return func(o *options) { o.pollLimit = d } }

// WithRedeliveryLag makes an invisible message stay away for d longer than was
// asked, as the real broker does by 2 to 3 s. Its handle expires without the lag.
// Default: 0.
func WithRedeliveryLag(d time.Duration) Option { return func(o *options) { o.lag = d } }

// WithRouteCache makes the Broker remember for d that a topic was not there, and
// answer so even if it has been created since. The real proxy does it for 20 s.
// Default: 0.
func WithRouteCache(d time.Duration) Option { return func(o *options) { o.routeCache = d } }

// WithSendAttempts makes the settings tell producers to send up to n times, which
// the official client then does at once and with the same message id. The real
// proxy says 3. Default: the settings say nothing, and the client's own
// WithMaxAttempts holds; for the client applies the answer without a lock, which
// the race detector reports.
func WithSendAttempts(n int) Option { return func(o *options) { o.sendAttempts = n } }

// WithGhostPolls makes a Receive whose client has gone poll on, as the real proxy does:
// within its polling time it takes what becomes visible, finds nobody to give it to,
// and puts it back for a second, plus the redelivery lag, without counting an
// attempt. Default: a Receive ends with its client.
func WithGhostPolls() Option { return func(o *options) { o.ghostPolls = true } }

// WithRecall allows RecallMessage (recallMessageEnable). Default: it is forbidden, as
// in a real broker that is not told otherwise; recall handles are handed out all the
// same.
func WithRecall() Option { return func(o *options) { o.recall = true } }

// WithTLS makes the endpoint speak TLS with a certificate of its own for
// 127.0.0.1, ::1 and localhost; see [Broker.CertPool] and [Broker.CertPEM].
// Default: plaintext.
func WithTLS() Option { return func(o *options) { o.tls = true } }

// WithCredentials makes every call without a signature by this key pair fail with
// 40100. Default: no signature is looked at.
func WithCredentials(accessKey, secretKey string) Option {
	return func(o *options) { o.accessKey, o.secretKey = accessKey, secretKey }
}

// WithListenAddress sets the address to listen on. Default: 127.0.0.1:0, a free
// port of the loopback.
func WithListenAddress(addr string) Option { return func(o *options) { o.listenAddress = addr } }

// Broker is the embedded endpoint. Its methods are safe for concurrent use.
type Broker struct {
	opts    options
	addr    string
	tlsConf *tls.Config
	pool    *x509.CertPool
	certPEM []byte
	gate    gate // shut while frozen
	unwatch func()

	life   sync.Mutex    // serialises Stop, Resume and Close; guards the next four
	server *grpc.Server  // nil while stopped
	served chan struct{} // closed when the Serve of server has returned
	stop   chan struct{} // closed when server is about to stop
	closed bool

	mu         sync.Mutex // guards everything below
	skew       time.Duration
	topics     map[string]*topic
	groups     map[string]*group
	deliveries map[int64]*delivery
	lastID     int64
	accepted   []*message           // in the order of arrival
	missing    map[string]time.Time // topics that were asked for in vain, and when
	clients    map[string]*v2.Settings
	streams    int
	conns      map[*conn]struct{}
	calls      map[string]int
	controls   []*control
	losses     map[string]int
	visible    chan struct{} // closed and replaced when a Receive may find more
	changed    chan struct{} // closed and replaced on every change that a test may wait for
}

// TB is the part of testing.TB that Start needs.
type TB interface {
	Helper()
	Cleanup(func())
	Fatalf(format string, args ...any)
}

// Start returns a running Broker that is closed when the test ends. It fails the
// test if no port can be had.
func Start(t TB, opts ...Option) *Broker {
	t.Helper()
	b, err := New(opts...)
	if err != nil {
		t.Fatalf("start embedded broker: %v", err)
		return nil
	}
	t.Cleanup(b.Close)
	return b
}

// New returns a running Broker without topics and groups; the caller closes it.
func New(opts ...Option) (*Broker, error) {
	o := options{precision: defaultPrecision, maxDelay: defaultMaxDelay, listenAddress: "127.0.0.1:0"}
	for _, opt := range opts {
		opt(&o)
	}
	if o.precision < time.Millisecond {
		return nil, fmt.Errorf("timer precision is %v: it must be 1ms or more", o.precision)
	}
	b := &Broker{
		opts:       o,
		topics:     make(map[string]*topic),
		groups:     make(map[string]*group),
		deliveries: make(map[int64]*delivery),
		missing:    make(map[string]time.Time),
		clients:    make(map[string]*v2.Settings),
		conns:      make(map[*conn]struct{}),
		calls:      make(map[string]int),
		losses:     make(map[string]int),
		visible:    make(chan struct{}),
		changed:    make(chan struct{}),
	}
	if o.tls {
		if err := b.makeCertificate(); err != nil {
			return nil, err
		}
	}
	l, err := b.listen(o.listenAddress)
	if err != nil {
		return nil, err
	}
	b.addr = l.Addr().String()
	if o.clock != nil {
		b.unwatch = o.clock.watch(b.wake)
	}
	b.life.Lock()
	b.serve(l)
	b.life.Unlock()
	return b, nil
}

// Endpoint returns host:port. It stays the same over Stop, Resume and Restart.
func (b *Broker) Endpoint() string { return b.addr }

// Close ends the endpoint, every connection and every call; nothing of it runs
// when Close returns. Closing twice is harmless. What was received can still be
// inspected. A control function that ignores its context delays Close.
func (b *Broker) Close() {
	b.life.Lock()
	defer b.life.Unlock()
	if b.closed {
		return
	}
	b.closed = true
	b.halt()
	if b.unwatch != nil {
		b.unwatch()
	}
}

// Stop ends every connection and leaves nothing listening on the port: a broker
// that is down. Messages, groups and clients' settings are kept. Stopping twice is
// harmless.
func (b *Broker) Stop() {
	b.life.Lock()
	defer b.life.Unlock()
	b.halt()
}

// Resume listens again on the same port after Stop; on a Broker that runs it does
// nothing. It fails on a closed Broker, or if another process took the port.
func (b *Broker) Resume() error {
	b.life.Lock()
	defer b.life.Unlock()
	if b.closed {
		return errors.New("resume embedded broker: it is closed")
	}
	if b.server != nil {
		return nil
	}
	l, err := b.listen(b.addr)
	if err != nil {
		return err
	}
	b.serve(l)
	return nil
}

// Restart is what a proxy's restart looks like from outside: connections and
// streams end, the settings of all clients are forgotten, messages and their
// invisible times are kept. Until a client has sent its settings again, its
// heartbeats get 40015 and its Receive gets 50001.
func (b *Broker) Restart() error {
	b.Stop()
	b.ForgetClients()
	return b.Resume()
}

// ForgetClients forgets the settings of all clients and keeps their connections,
// as a proxy does behind a load balancer that moved the client.
func (b *Broker) ForgetClients() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.clients)
	b.noteChange()
}

// Freeze lets every connection, and those to come, go quiet: bytes are accepted,
// nothing is answered and nothing is done, as with a stopped process. Freezing twice
// is harmless; a Stop or Restart ends it.
func (b *Broker) Freeze() { b.gate.shut() }

// Thaw ends a Freeze. What has arrived meanwhile is worked off.
func (b *Broker) Thaw() {
	b.gate.open()
	b.wake()
}

// HalfOpen lets the connections that are open now go quiet for good, as if a firewall
// had forgotten them: bytes are accepted and nothing is answered. Connections that
// are made later work. A Receive that waits at this moment still takes messages, and
// its answer goes nowhere.
func (b *Broker) HalfOpen() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.conns {
		c.own.shut()
	}
}

// SetSkew sets how far the Broker's clock is ahead of the real one, or of its
// [Clock]; negative: behind. Waiting Receives are woken.
func (b *Broker) SetSkew(d time.Duration) {
	b.mu.Lock()
	b.skew = d
	b.noteVisible()
	b.mu.Unlock()
}

// now returns the Broker's time. The caller holds mu.
func (b *Broker) now() time.Time {
	if b.opts.clock != nil {
		return b.opts.clock.Now().Add(b.skew)
	}
	return time.Now().Add(b.skew)
}

func (b *Broker) wake() {
	b.mu.Lock()
	b.noteVisible()
	b.mu.Unlock()
}

// noteVisible wakes the Receives that wait, and those in Until. The caller holds mu.
func (b *Broker) noteVisible() {
	close(b.visible)
	b.visible = make(chan struct{})
	b.noteChange()
}

// noteChange wakes those who wait in Until. The caller holds mu.
func (b *Broker) noteChange() {
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *Broker) listen(addr string) (net.Listener, error) {
	limit := time.Now().Add(portReuseTimeout)
	for {
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", addr)
		if err == nil {
			return &listener{Listener: l, b: b}, nil
		}
		// A connection that some other process opened meanwhile may have been given
		// our port as its own; it is usually gone in a moment.
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(limit) {
			return nil, fmt.Errorf("listen on %s for the embedded broker: %w", addr, err)
		}
		time.Sleep(portReuseInterval)
	}
}

// serve starts a server on l. The caller holds life.
func (b *Broker) serve(l net.Listener) {
	opts := []grpc.ServerOption{
		grpc.UnaryInterceptor(b.intercept),
		grpc.MaxRecvMsgSize(maxRequestBytes),
		grpc.MaxSendMsgSize(maxRequestBytes),
		grpc.WaitForHandlers(true),
	}
	if b.tlsConf != nil {
		opts = append(opts, grpc.Creds(credentials.NewTLS(b.tlsConf)))
	}
	s := grpc.NewServer(opts...)
	served, stop := make(chan struct{}), make(chan struct{})
	v2.RegisterMessagingServiceServer(s, &service{b: b, stop: stop})
	b.server, b.served, b.stop = s, served, stop
	go func() { // ended by s.Stop in halt
		defer close(served)
		_ = s.Serve(l) // it only returns when stopped
	}()
}

// halt stops the server, if there is one. The caller holds life.
func (b *Broker) halt() {
	if b.server == nil {
		return
	}
	close(b.stop)
	b.server.Stop()
	<-b.served
	b.gate.open()
	b.server, b.served, b.stop = nil, nil, nil
}

// endpoints returns where the Broker listens, in the form of the protocol.
func (b *Broker) endpoints() *v2.Endpoints {
	host, port, _ := net.SplitHostPort(b.addr)
	n, _ := strconv.ParseInt(port, 10, 32)
	scheme := v2.AddressScheme_DOMAIN_NAME
	if ip := net.ParseIP(host); ip != nil {
		scheme = v2.AddressScheme_IPv4
		if ip.To4() == nil {
			scheme = v2.AddressScheme_IPv6
		}
	}
	return &v2.Endpoints{Scheme: scheme, Addresses: []*v2.Address{{Host: host, Port: int32(n)}}}
}

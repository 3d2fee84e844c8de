package rmq

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"path"
	"strings"
	"sync"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	// A body is at most 4 MiB and comes one message a frame.
	maxReceiveSize = 16 << 20

	// The proxy answers pings more frequent than every 300 s with GOAWAY
	// (rocketmq#10510), so keepalive cannot be the watch on a connection; verify is.
	keepaliveTime = 310 * time.Second

	// The header of temporary credentials, which the Go client v5.1.4 does not send.
	sessionTokenHeader = "x-mq-session-token" //nolint:gosec // the name of a header
)

// link holds everything of one Producer's or Consumer's way to the servers: one
// connection and one telemetry stream per target. All calls of the official
// client pass through invoke and stream.
type link struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics
	tls     *tls.Config // nil: plaintext
	group   *v2.Resource
	role    v2.ClientType

	ctx    context.Context // ends with close
	cancel context.CancelFunc
	wg     sync.WaitGroup // telemetry sessions and verifications

	mu        sync.Mutex
	closed    bool
	sign      func(context.Context) context.Context // of the current client
	conns     map[string]*grpc.ClientConn           // by target
	sessions  map[string]*session                   // by target
	settings  *v2.TelemetryCommand                  // the last that the client sent
	seed      map[string]*v2.QueryRouteResponse     // by topic, for the client's first look-up
	routes    map[string]*v2.QueryRouteResponse     // by topic, the newest good answer
	verifying map[string]bool                       // by target
	handshake error                                 // of the last TLS handshake, nil when it succeeded
}

func newLink(cfg Config, role v2.ClientType, group string) (*link, error) {
	tlsConfig, err := cfg.TLS.clientConfig()
	if err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	l := &link{
		cfg: cfg, log: cfg.Logger, metrics: m, tls: tlsConfig, role: role,
		conns:     make(map[string]*grpc.ClientConn),
		sessions:  make(map[string]*session),
		seed:      make(map[string]*v2.QueryRouteResponse),
		routes:    make(map[string]*v2.QueryRouteResponse),
		verifying: make(map[string]bool),
	}
	if group != "" {
		l.group = &v2.Resource{Name: group, ResourceNamespace: cfg.Namespace}
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l, nil
}

// close ends all connections, and with them every call. It waits for the
// goroutines of the link, none of which waits for anything but the link.
func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	conns := l.conns
	l.conns = make(map[string]*grpc.ClientConn)
	l.mu.Unlock()
	l.cancel()
	for _, cc := range conns {
		_ = cc.Close() // it fails only when it is closed already
	}
	l.wg.Wait()
}

// conn returns the connection to target, which is created without dialling. The
// first call over it dials.
func (l *link) conn(target string) (*grpc.ClientConn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, status.Error(codes.Canceled, ErrClosed.Error())
	}
	if cc, ok := l.conns[target]; ok {
		return cc, nil
	}
	cc, err := l.dial(target)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "connect to %s: %v", target, err)
	}
	l.conns[target] = cc
	return cc, nil
}

// dial takes a target as the client writes it: host:port, or ip:///host:port with
// further addresses after semicolons.
func (l *link) dial(target string) (*grpc.ClientConn, error) {
	addrs, err := parseEndpoints(target)
	if err != nil {
		return nil, err
	}
	creds := insecure.NewCredentials()
	if l.tls != nil {
		creds = &watchedTLS{TransportCredentials: credentials.NewTLS(l.tls.Clone()), link: l}
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithConnectParams(grpc.ConnectParams{
			// One second at most, so that a server that is up again is found at once;
			// there are few of us.
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: 20 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReceiveSize)),
		grpc.WithDisableServiceConfig(),
		grpc.WithNoProxy(), // a broker is not reached through the proxy for HTTP
	}
	if len(addrs) == 1 {
		// passthrough: the name is looked up at each connect, so a broker that comes
		// back elsewhere behind its name is found (the DNS resolver of gRPC asks again
		// after 30 s at the earliest).
		return grpc.NewClient("passthrough:///"+addrs[0], opts...)
	}
	rand.Shuffle(len(addrs), func(i, j int) { addrs[i], addrs[j] = addrs[j], addrs[i] }) //nolint:gosec // no secret
	state := resolver.State{}
	for _, a := range addrs {
		host, _, _ := net.SplitHostPort(a)
		state.Addresses = append(state.Addresses, resolver.Address{Addr: a, ServerName: host})
	}
	r := manual.NewBuilderWithScheme("rmq")
	r.InitialState(state)
	return grpc.NewClient("rmq:///"+addrs[0], append(opts, grpc.WithResolvers(r))...)
}

// replace gives the connection up, if it is still the one in use. Closing it ends
// all calls over it; the next call dials anew.
func (l *link) replace(target string, old *grpc.ClientConn) {
	l.mu.Lock()
	current := l.conns[target] == old
	if current {
		delete(l.conns, target)
	}
	l.mu.Unlock()
	if !current {
		return
	}
	l.metrics.replaced.Inc()
	l.log.Warn("rocketmq connection has stopped answering; connecting again", "target", target)
	_ = old.Close()
}

func (l *link) setSigner(sign func(context.Context) context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sign = sign
}

// signed adds the client's headers, fresh credentials included. It must not be
// used on a context that carries them already.
func (l *link) signed(ctx context.Context) context.Context {
	l.mu.Lock()
	sign := l.sign
	l.mu.Unlock()
	return l.withToken(sign(ctx))
}

func (l *link) withToken(ctx context.Context) context.Context {
	if l.cfg.SecurityToken == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, sessionTokenHeader, l.cfg.SecurityToken)
}

// invoke carries a unary call of the client. It repeats nothing: repeating is for
// the callers, who know what a repetition means.
func (l *link) invoke(ctx context.Context, target, method string, req, reply any, opts ...grpc.CallOption) error {
	if seeded := l.seeded(req, reply); seeded {
		return nil
	}
	cc, err := l.conn(target)
	if err != nil {
		return err
	}
	start := time.Now()
	err = cc.Invoke(l.withToken(ctx), method, req, reply, opts...)
	st := replyStatus(reply)
	l.observe(method, target, start, st, err)
	if err != nil {
		l.suspect(target, cc, start, err)
		return err
	}
	switch r := reply.(type) {
	case *v2.QueryRouteResponse:
		l.learnRoute(req.(*v2.QueryRouteRequest).GetTopic().GetName(), r)
	case *v2.HeartbeatResponse:
		if st.GetCode() == v2.Code_UNRECOGNIZED_CLIENT_TYPE {
			// The proxy does not know us: it was restarted and has no settings of ours.
			l.session(target).reopen("the proxy does not know this client", start)
		}
	case *v2.AckMessageResponse, *v2.ChangeInvisibleDurationResponse:
		// The client takes any answer to an Ack for success (simple_consumer.go:460),
		// and replaces the handle by the empty one of a refusal (simple_consumer.go:121).
		if st.GetCode() != v2.Code_OK {
			return &golang.ErrRpcStatus{Code: int32(st.GetCode()), Message: st.GetMessage()}
		}
	}
	return nil
}

// stream opens a stream of the client: Telemetry is kept by a session of the
// link, ReceiveMessage goes to the server.
func (l *link) stream(ctx context.Context, target string, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if method == v2.MessagingService_Telemetry_FullMethodName {
		return l.telemetry(ctx, target)
	}
	cc, err := l.conn(target)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	s, err := cc.NewStream(l.withToken(ctx), desc, method, opts...)
	if err != nil {
		l.observe(method, target, start, nil, err)
		return nil, err
	}
	return &receiveStream{ClientStream: s, link: l, cc: cc, target: target, method: method, start: start}, nil
}

// receiveStream watches a ReceiveMessage.
type receiveStream struct {
	grpc.ClientStream
	link           *link
	cc             *grpc.ClientConn
	target, method string
	start          time.Time
	status         *v2.Status
	observed       bool
}

func (s *receiveStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	resp, ok := m.(*v2.ReceiveMessageResponse)
	switch {
	case err != nil:
		s.done(err)
	case !ok:
	case resp.GetStatus() != nil:
		s.status = resp.GetStatus()
	case resp.GetMessage() != nil && resp.GetMessage().GetSystemProperties() == nil:
		// The client would panic (message.go:283) and take the whole batch with it.
		resp.GetMessage().SystemProperties = &v2.SystemProperties{}
	}
	return err
}

func (s *receiveStream) done(err error) {
	if s.observed {
		return
	}
	s.observed = true
	if errors.Is(err, io.EOF) {
		err = nil
	}
	s.link.observe(s.method, s.target, s.start, s.status, err)
	if err != nil {
		s.link.suspect(s.target, s.cc, s.start, err)
	}
	if s.status.GetCode() == v2.Code_INTERNAL_SERVER_ERROR {
		// What a restarted proxy answers to a consumer whose settings it has not
		// (ReceiveMessageActivity:67, rocketmq#8714).
		s.link.session(s.target).reopen("receive answered 50001", s.start)
	}
}

// observe counts and, if it was refused, logs a call at debug level. Bodies are
// not looked at.
func (l *link) observe(method, target string, start time.Time, st *v2.Status, err error) {
	method = path.Base(method)
	took := time.Since(start)
	code := "NO_STATUS"
	switch {
	case err != nil:
		code = "grpc_" + status.Code(err).String()
	case st != nil:
		code = st.GetCode().String()
	}
	l.metrics.requests.WithLabelValues(method, code).Inc()
	l.metrics.duration.WithLabelValues(method).Observe(took.Seconds())
	if err == nil && (st.GetCode() == v2.Code_OK || st.GetCode() == v2.Code_MESSAGE_NOT_FOUND) {
		return
	}
	l.log.Debug("rocketmq request failed", "method", method, "target", target, "code", code, "took", took, "message", st.GetMessage(), "err", err)
}

// suspect looks at a call that no server answered in time. It may be the call, or
// the connection: a peer that vanished without a word is noticed by nothing else.
func (l *link) suspect(target string, cc *grpc.ClientConn, start time.Time, err error) {
	// A shorter wait is the caller's own deadline and says nothing.
	if status.Code(err) != codes.DeadlineExceeded || time.Since(start) < l.cfg.RequestTimeout*9/10 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.verifying[target] || l.conns[target] != cc {
		return
	}
	l.verifying[target] = true
	l.wg.Go(func() {
		l.verify(target, cc)
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.verifying, target)
	})
}

// verify replaces the connection unless it answers one heartbeat; any answer
// will do.
func (l *link) verify(target string, cc *grpc.ClientConn) {
	ctx, cancel := context.WithTimeout(l.ctx, l.cfg.RequestTimeout)
	defer cancel()
	method := v2.MessagingService_Heartbeat_FullMethodName
	start, reply := time.Now(), &v2.HeartbeatResponse{}
	err := cc.Invoke(l.signed(ctx), method, &v2.HeartbeatRequest{Group: l.group, ClientType: l.role}, reply)
	l.observe(method, target, start, reply.GetStatus(), err)
	if status.Code(err) == codes.DeadlineExceeded {
		l.replace(target, cc)
	}
}

// seedRoutes gives the client's first look-up of each topic the answer of the
// probe, so that its Start cannot fail on a route any more: a Start that failed
// leaves four goroutines behind, and there is no bound on how often it would.
func (l *link) seedRoutes(routes map[string]*v2.QueryRouteResponse) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for topic, r := range routes {
		l.seed[topic] = r
		l.routes[topic] = r
	}
}

func (l *link) seeded(req, reply any) bool {
	q, ok := req.(*v2.QueryRouteRequest)
	if !ok {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.seed[q.GetTopic().GetName()]
	if ok {
		delete(l.seed, q.GetTopic().GetName())
		proto.Merge(reply.(*v2.QueryRouteResponse), r)
	}
	return ok
}

func (l *link) learnRoute(topic string, r *v2.QueryRouteResponse) {
	if r.GetStatus().GetCode() != v2.Code_OK || len(r.GetMessageQueues()) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ours := l.routes[topic]; ours {
		l.routes[topic] = proto.CloneOf(r)
	}
}

// accepts returns the message types of a topic by the newest route.
func (l *link) accepts(topic string) []v2.MessageType {
	l.mu.Lock()
	defer l.mu.Unlock()
	return messageTypes(l.routes[topic])
}

// targets of all brokers in the newest routes.
func (l *link) targets() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[string]bool)
	for _, r := range l.routes {
		for _, q := range r.GetMessageQueues() {
			out[targetOf(q.GetBroker().GetEndpoints())] = true
		}
	}
	return out
}

// targetOf writes endpoints as the client does (client_manager.go:191-199).
func targetOf(e *v2.Endpoints) string {
	addrs := make([]string, 0, len(e.GetAddresses()))
	for _, a := range e.GetAddresses() {
		addrs = append(addrs, net.JoinHostPort(a.GetHost(), fmt.Sprint(a.GetPort())))
	}
	if e.GetScheme() == v2.AddressScheme_DOMAIN_NAME && len(addrs) > 0 {
		return addrs[0]
	}
	return "ip:///" + strings.Join(addrs, ";")
}

func messageTypes(r *v2.QueryRouteResponse) []v2.MessageType {
	if len(r.GetMessageQueues()) == 0 {
		return nil
	}
	return r.GetMessageQueues()[0].GetAcceptMessageTypes()
}

func replyStatus(reply any) *v2.Status {
	if s, ok := reply.(interface{ GetStatus() *v2.Status }); ok {
		return s.GetStatus()
	}
	return nil
}

// explain adds to a connection error what to do about it, where the TLS handshake
// says so. gRPC hands errors on as text, so the handshake is watched for the value.
func (l *link) explain(err error) error {
	l.mu.Lock()
	hs := l.handshake
	l.mu.Unlock()
	if transportCode(err) == codes.OK {
		return err
	}
	if l.tls == nil {
		if transportCode(err) == codes.Unavailable && strings.Contains(err.Error(), "error reading server preface") {
			return fmt.Errorf("%w (the connection is plaintext; if the server speaks TLS, turn TLS on)", err)
		}
		return err
	}
	if hs == nil {
		return err
	}
	if !strings.Contains(err.Error(), hs.Error()) { // a time-out, for one, does not name it
		err = fmt.Errorf("%w (TLS handshake: %w)", err, hs)
	}
	var (
		record   tls.RecordHeaderError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		invalid  x509.CertificateInvalidError
	)
	switch {
	case errors.As(hs, &record):
		return fmt.Errorf("%w (the server does not speak TLS; turn TLS off if that is meant)", err)
	case errors.As(hs, &unknown):
		return fmt.Errorf("%w (the certificate is not verified; give the CA file of its issuer)", err)
	case errors.As(hs, &hostname):
		return fmt.Errorf("%w (the certificate is for another name; give the server name)", err)
	case errors.As(hs, &invalid):
		return fmt.Errorf("%w (the certificate is not valid)", err)
	}
	return err
}

// watchedTLS keeps the outcome of the last handshake.
type watchedTLS struct {
	credentials.TransportCredentials
	link *link
}

func (w *watchedTLS) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := w.TransportCredentials.ClientHandshake(ctx, authority, raw)
	w.link.mu.Lock()
	defer w.link.mu.Unlock()
	w.link.handshake = err
	return conn, info, err
}

func (w *watchedTLS) Clone() credentials.TransportCredentials {
	return &watchedTLS{TransportCredentials: w.TransportCredentials.Clone(), link: w.link}
}

package rmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	"github.com/apache/rocketmq-clients/golang/v5/pkg/utils"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc/codes"
)

const (
	// Pauses between attempts to connect: quick enough for a start of the whole
	// stack at once, slow enough for a broker that is away for a night (a proxy that did not know a
	// topic says so for 20 s more, so a longer pause would show).
	connectPauseMin = 250 * time.Millisecond
	connectPauseMax = 3 * time.Second
)

// official is what the Producer and the SimpleConsumer of the official client
// have in common.
type official interface {
	Start() error
	GracefulStop() error
}

// connector brings one official client up in the background and takes it down.
//
// A client that has failed to start is unusable and leaves goroutines behind.
// So everything that can fail is tried before there is one: the routes are asked
// for with the generated stub, and the telemetry stream never fails (telemetry.go).
// However long the servers are away, one client is built.
type connector[C official] struct {
	cfg       Config
	link      *link
	endpoints *v2.Endpoints // of cfg
	access    []string      // the same as targets, to be asked for routes in this order
	topics    []string
	build     func(*golang.Config, golang.NewClientFunc) (C, error)

	ctx     context.Context // ends when shutdown begins to cut off
	cancel  context.CancelFunc
	ran     chan struct{} // closed when run has returned
	closing chan struct{} // closed when Close has been called
	closed  chan struct{} // closed when shutdown is complete

	mu       sync.Mutex
	client   C
	clientID string
	started  bool
	cause    error         // why it is not started
	inFlight int           // calls to client
	idle     chan struct{} // closed when closing and inFlight is 0
}

func newConnector[C official](cfg Config, role v2.ClientType, group string, topics []string, build func(*golang.Config, golang.NewClientFunc) (C, error)) (*connector[C], error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := validateTopics(topics); err != nil {
		return nil, err
	}
	endpoints, err := utils.ParseTarget(cfg.Endpoints)
	if err != nil {
		return nil, err
	}
	l, err := newLink(cfg, role, group)
	if err != nil {
		return nil, err
	}
	c := &connector[C]{
		cfg: cfg, link: l, topics: topics, build: build,
		endpoints: endpoints, access: accessTargets(endpoints),
		ran:     make(chan struct{}),
		closing: make(chan struct{}),
		closed:  make(chan struct{}),
		idle:    make(chan struct{}),
		cause:   fmt.Errorf("connecting to %s", cfg.Endpoints),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background()) //nolint:gosec // shutdown calls it
	go c.run(group)                                            // ended by shutdown, which waits for ran
	return c, nil
}

// accessTargets writes the endpoints as the official client will, so that the
// probe uses the connections that it will use: addresses together, names each by
// itself.
func accessTargets(e *v2.Endpoints) []string {
	if e.GetScheme() != v2.AddressScheme_DOMAIN_NAME {
		return []string{targetOf(e)}
	}
	var out []string
	for _, a := range e.GetAddresses() {
		out = append(out, utils.ParseAddress(a))
	}
	return out
}

// run connects, with growing pauses, until it has succeeded or shutdown begins.
func (c *connector[C]) run(group string) {
	defer close(c.ran)
	pause := connectPauseMin
	for {
		err := c.connect(group)
		if err == nil || c.ctx.Err() != nil {
			return
		}
		c.notReady(err)
		jittered := pause*3/4 + rand.N(pause/2) //nolint:gosec // no secret
		select {
		case <-time.After(jittered):
		case <-c.ctx.Done():
			return
		}
		pause = min(pause*2, connectPauseMax)
	}
}

// notReady keeps the cause and logs it when it is another than before.
func (c *connector[C]) notReady(cause error) {
	c.mu.Lock()
	changed := c.cause == nil || c.cause.Error() != cause.Error()
	c.cause = cause
	c.mu.Unlock()
	if changed {
		c.cfg.Logger.Warn("rocketmq is not ready", "endpoints", c.cfg.Endpoints, "topics", c.topics, "err", cause)
	}
}

func (c *connector[C]) connect(group string) error {
	conf := &golang.Config{Endpoint: c.cfg.Endpoints, NameSpace: c.cfg.Namespace, ConsumerGroup: group}
	if c.cfg.AccessKey != "" {
		conf.Credentials = &credentials.SessionCredentials{AccessKey: c.cfg.AccessKey, AccessSecret: c.cfg.SecretKey, SecurityToken: c.cfg.SecurityToken}
	}
	// The identity of the client, with which the probe signs too. It starts nothing.
	identity, err := golang.NewClient(conf, golang.WithQueryRouteTimeout(c.cfg.RequestTimeout))
	if err != nil {
		return fmt.Errorf("prepare the client: %w", err)
	}
	c.link.setSigner(identity.Sign)

	routes, err := c.probe()
	if err != nil {
		return err
	}
	client, err := c.build(conf, func(*golang.Config, ...golang.ClientOption) (golang.Client, error) { return identity, nil })
	if err != nil {
		return fmt.Errorf("build the client: %w", err)
	}
	c.link.seedRoutes(routes)
	registerLink(identity.GetClientID(), c.link)

	started := make(chan error, 1)
	go func() { // ended by settings, or by the end of the link, which shutdown brings about
		var err error
		defer func() { started <- err }()
		defer recovered("start", &err)
		err = client.Start()
	}()
	// Start waits for the server's settings without a limit. So do we, but not in
	// silence.
	overdue := time.NewTicker(c.cfg.RequestTimeout)
	defer overdue.Stop()
	for {
		select {
		case err := <-started:
			c.mu.Lock()
			c.clientID = identity.GetClientID()
			c.client = client
			c.started = err == nil
			c.mu.Unlock()
			if err == nil && c.ctx.Err() == nil {
				args := []any{"endpoints", c.cfg.Endpoints, "topics", c.topics}
				if group != "" { // a producer has none
					args = append(args, "group", group)
				}
				c.cfg.Logger.Info("rocketmq is ready", args...)
			}
			if err != nil {
				unregisterLink(identity.GetClientID())
				return fmt.Errorf("start the client: %w", edge(c.ctx, err))
			}
			return nil
		case <-overdue.C:
			if err := c.link.health(); err != nil {
				c.notReady(c.withFix(err, group))
			}
		}
	}
}

// withFix says what to do about a refusal of the settings.
func (c *connector[C]) withFix(err error, group string) error {
	code, _ := Code(err)
	switch {
	case group != "" && (v2.Code(code) == v2.Code_CONSUMER_GROUP_NOT_FOUND || transportCode(err) == codes.InvalidArgument):
		// The proxy ends the stream with InvalidArgument; the code 40403 is in its text.
		retries := 16
		if slices.ContainsFunc(c.topics, func(t string) bool { return strings.HasPrefix(t, "%DLQ%") }) {
			// A dead letter keeps the count of its deliveries: a reader with fewer retries than that never sees it.
			retries = 1000
		}
		return fmt.Errorf("%s refuses consumer group %s; if it does not exist, create it with: mqadmin updateSubGroup -n NAMESERVER:9876 -c DefaultCluster -g %s -r %d: %w", c.cfg.Endpoints, group, group, retries, err)
	case v2.Code(code) == v2.Code_UNAUTHORIZED || v2.Code(code) == v2.Code_FORBIDDEN:
		return fmt.Errorf("%s refuses the credentials; check access key, secret key and the rights of that user: %w", c.cfg.Endpoints, err)
	}
	return fmt.Errorf("no settings from %s for the client to start with: %w", c.cfg.Endpoints, err)
}

// probe asks for the route of each topic and checks its type.
func (c *connector[C]) probe() (map[string]*v2.QueryRouteResponse, error) {
	routes := make(map[string]*v2.QueryRouteResponse)
	for _, topic := range c.topics {
		r, err := c.queryRoute(topic)
		if err != nil {
			return nil, err
		}
		if err := c.checkRoute(topic, r); err != nil {
			return nil, err
		}
		routes[topic] = r
	}
	return routes, nil
}

func (c *connector[C]) queryRoute(topic string) (*v2.QueryRouteResponse, error) {
	req := &v2.QueryRouteRequest{Topic: &v2.Resource{Name: topic, ResourceNamespace: c.cfg.Namespace}, Endpoints: c.endpoints}
	var errs []error
	for _, target := range c.access {
		cc, err := c.link.conn(target)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(c.link.ctx, c.cfg.RequestTimeout)
		start, method := time.Now(), v2.MessagingService_QueryRoute_FullMethodName
		reply := &v2.QueryRouteResponse{}
		err = cc.Invoke(c.link.signed(ctx), method, req, reply)
		cancel()
		c.link.observe(method, target, start, reply.GetStatus(), err)
		if err == nil {
			return reply, nil
		}
		c.link.suspect(target, cc, start, err)
		errs = append(errs, fmt.Errorf("ask %s for topic %s: %w", strings.TrimPrefix(target, "ip:///"), topic, c.link.explain(err)))
	}
	return nil, errors.Join(errs...)
}

func (c *connector[C]) checkRoute(topic string, r *v2.QueryRouteResponse) error {
	wanted := c.cfg.TopicType
	if strings.HasPrefix(topic, "%") {
		wanted = TopicAny
	}
	fix := fmt.Sprintf("mqadmin updateTopic -n NAMESERVER:9876 -c DefaultCluster -t %s -r 8 -w 8 -a +message.type=%s (the proxy may take 20 s to see it)",
		topic, strings.Replace(wanted, TopicAny, TopicNormal, 1))
	if code := r.GetStatus().GetCode(); code != v2.Code_OK {
		err := refusal(int32(code), r.GetStatus().GetMessage())
		switch code {
		case v2.Code_TOPIC_NOT_FOUND:
			return fmt.Errorf("topic %s does not exist at %s; create it with: %s: %w", topic, c.cfg.Endpoints, fix, err)
		case v2.Code_UNAUTHORIZED, v2.Code_FORBIDDEN:
			return fmt.Errorf("%s refuses the credentials for topic %s; check access key, secret key and the rights of that user: %w", c.cfg.Endpoints, topic, err)
		}
		return fmt.Errorf("route of topic %s at %s: %w", topic, c.cfg.Endpoints, err)
	}
	if len(r.GetMessageQueues()) == 0 {
		return fmt.Errorf("topic %s at %s has no queue: no broker serves it", topic, c.cfg.Endpoints)
	}
	types := messageTypes(r)
	if wanted != TopicAny && !slices.Contains(types, v2.MessageType(v2.MessageType_value[wanted])) {
		return fmt.Errorf("topic %s at %s is of type %s, must be %s; set it with: %s", topic, c.cfg.Endpoints, typeNames(types), wanted, fix)
	}
	return nil
}

func typeNames(types []v2.MessageType) string {
	var names []string
	for _, t := range types {
		if t == v2.MessageType_MESSAGE_TYPE_UNSPECIFIED {
			names = append(names, "UNSPECIFIED")
		} else {
			names = append(names, t.String())
		}
	}
	if len(names) == 0 {
		return "UNSPECIFIED"
	}
	return strings.Join(names, "+")
}

// ready returns nil, or what is missing.
func (c *connector[C]) ready() error {
	select {
	case <-c.closing:
		return ErrClosed
	default:
	}
	c.mu.Lock()
	started, cause := c.started, c.cause
	c.mu.Unlock()
	if !started {
		return fmt.Errorf("%w: %w", ErrNotReady, cause)
	}
	if err := c.link.health(); err != nil {
		return fmt.Errorf("%w: connection to %s is lost and being made again: %w", ErrNotReady, c.cfg.Endpoints, err)
	}
	return nil
}

// enter returns the client for one call; leave must follow.
func (c *connector[C]) enter() (C, error) {
	var none C
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.closing:
		return none, ErrClosed
	default:
	}
	if !c.started {
		return none, fmt.Errorf("%w: %w", ErrNotReady, c.cause)
	}
	c.inFlight++
	return c.client, nil
}

// hold keeps shutdown waiting for one more call of a caller that has entered.
func (c *connector[C]) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight++
}

func (c *connector[C]) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight--
	c.signalIdle()
}

// signalIdle must be called with mu held.
func (c *connector[C]) signalIdle() {
	select {
	case <-c.closing:
	default:
		return
	}
	select {
	case <-c.idle:
	default:
		if c.inFlight == 0 {
			close(c.idle)
		}
	}
}

// close refuses new calls, waits until ctx ends for those under way, lets before
// use the client once more, and takes everything down. When ctx ends first, its
// error is returned and the rest goes on in the background; that takes about a
// second at most.
func (c *connector[C]) close(ctx context.Context, before func(context.Context, C)) error {
	c.mu.Lock()
	select {
	case <-c.closing:
	default:
		close(c.closing)
		c.signalIdle()
		go c.shutdown(ctx, before) // ends by itself, see above
	}
	c.mu.Unlock()
	select {
	case <-c.closed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close the rocketmq client: %w", ctx.Err())
	}
}

func (c *connector[C]) shutdown(ctx context.Context, before func(context.Context, C)) {
	defer close(c.closed)
	select {
	case <-c.idle:
	case <-ctx.Done():
	}
	c.mu.Lock()
	client, id, started := c.client, c.clientID, c.started
	c.mu.Unlock()
	if started && before != nil {
		before(ctx, client)
	}
	c.cancel()
	if !started {
		// Start may be waiting; the end of the link lets it return.
		c.link.close()
		<-c.ran
		c.mu.Lock()
		client, id, started = c.client, c.clientID, c.started
		c.mu.Unlock()
	}
	if started {
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			var err error
			defer recovered("stop", &err)
			_ = client.GracefulStop() // its only error is that it was stopped before
		}()
		// It tells the servers, which may not answer.
		select {
		case <-stopped:
		case <-ctx.Done():
		}
		c.link.close()
		<-stopped
		unregisterLink(id)
	}
	c.link.close()
	<-c.ran
}

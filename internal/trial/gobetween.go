package trial

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"sync"

	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/orders"
)

// goBetween stands between a relay and the real proxy and loses messages on purpose: of a share of the timed messages it says that they are
// stored, and never sends them on. Everything else goes through, in both directions. So the relay is the product's own, unmodified, and is
// deceived as by a broker that loses its disk: nobody but reconcile can notice.
//
// It has the calls of a producer; a consumer would get Unimplemented. Its own address is on the loopback and plaintext, whatever the real
// proxy has: the relay's signature goes through as it is.
type goBetween struct {
	v2.UnimplementedMessagingServiceServer
	topic  string // of the timed messages; the others are left alone
	share  float64
	addr   *net.TCPAddr
	conn   *grpc.ClientConn // to the real proxy
	proxy  v2.MessagingServiceClient
	server *grpc.Server
	served chan struct{} // closed when the server has ended

	mu       sync.Mutex // guards the following
	rng      *rand.Rand
	next     int // number of the timed message that is lost next
	messages int // timed messages so far
	lost     int // of these
	orders   map[int64]bool
}

// loss is what a goBetween has lost so far.
type loss struct {
	Messages, Lost int
	// Orders are those that were in a lost message. True: no later message of the order got through.
	Orders map[int64]bool
}

// startGoBetween starts a go-between before the proxy of cfg, which loses that share of the topic's messages, more than 0 and up to 1. Call
// close when the relay has ended.
//
// One message is lost of every 1/share, at a place drawn from seed: with dice a short run might lose none.
func startGoBetween(ctx context.Context, cfg rmq.Config, topic string, share float64, seed uint64) (*goBetween, error) {
	conn, err := rmq.Dial(cfg)
	if err != nil {
		return nil, fmt.Errorf("start the go-between: %w", err)
	}
	var listen net.ListenConfig
	l, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the go-between: %w", err), conn.Close())
	}
	g := &goBetween{
		topic: topic, share: share, addr: l.Addr().(*net.TCPAddr), conn: conn, proxy: v2.NewMessagingServiceClient(conn),
		server: grpc.NewServer(), served: make(chan struct{}), orders: map[int64]bool{},
		// A stream of its own (the second word), so that the customers of a seed are the same with and without.
		rng: rand.New(rand.NewPCG(seed, 0x6c6f7365)), //nolint:gosec // has to be repeatable, not secret
	}
	g.next = int(g.rng.Float64() / share)
	v2.RegisterMessagingServiceServer(g.server, g)
	go func() { // ended by close
		defer close(g.served)
		_ = g.server.Serve(l) // Stop ends it; a relay that cannot connect says so
	}()
	return g, nil
}

// close ends all connections. It may be called again.
func (g *goBetween) close() {
	g.server.Stop()
	<-g.served
	_ = g.conn.Close() // it fails only when it is closed already
}

func (g *goBetween) endpoint() string { return g.addr.String() }

// loss says what was lost up to now.
func (g *goBetween) loss() loss {
	g.mu.Lock()
	defer g.mu.Unlock()
	return loss{Messages: g.messages, Lost: g.lost, Orders: maps.Clone(g.orders)}
}

// onwards is the context of a call to the real proxy on behalf of the one that is being served: with its deadline and its headers, of which
// the signature is made over others.
func onwards(ctx context.Context) context.Context {
	md, _ := metadata.FromIncomingContext(ctx)
	return metadata.NewOutgoingContext(ctx, md.Copy())
}

// QueryRoute names this go-between as the address of every broker, since the client goes where the route says.
func (g *goBetween) QueryRoute(ctx context.Context, req *v2.QueryRouteRequest) (*v2.QueryRouteResponse, error) {
	answer, err := g.proxy.QueryRoute(onwards(ctx), req)
	if err != nil {
		return nil, err
	}
	for _, q := range answer.GetMessageQueues() {
		if q.GetBroker() != nil {
			q.Broker.Endpoints = &v2.Endpoints{
				Scheme:    v2.AddressScheme_IPv4,
				Addresses: []*v2.Address{{Host: g.addr.IP.String(), Port: int32(g.addr.Port)}}, //nolint:gosec // a port
			}
		}
	}
	return answer, nil
}

// SendMessage sends on, or lies.
func (g *goBetween) SendMessage(ctx context.Context, req *v2.SendMessageRequest) (*v2.SendMessageResponse, error) {
	timed, err := g.timed(req)
	if err != nil {
		return nil, err
	}
	if len(timed) > 0 && g.lose(timed) {
		answer := &v2.SendMessageResponse{Status: &v2.Status{Code: v2.Code_OK, Message: v2.Code_OK.String()}}
		for _, m := range req.GetMessages() {
			answer.Entries = append(answer.Entries, &v2.SendResultEntry{Status: proto.CloneOf(answer.GetStatus()), MessageId: m.GetSystemProperties().GetMessageId()})
		}
		return answer, nil
	}
	answer, err := g.proxy.SendMessage(onwards(ctx), req)
	if err == nil && answer.GetStatus().GetCode() == v2.Code_OK {
		g.arrived(timed)
	}
	return answer, err
}

// timed gives the orders in a request's timed messages.
func (g *goBetween) timed(req *v2.SendMessageRequest) ([]int64, error) {
	var ids []int64
	for _, m := range req.GetMessages() {
		if m.GetTopic().GetName() != g.topic {
			continue
		}
		e, err := orders.DecodeExpiry(m.GetBody())
		if err != nil {
			return nil, fmt.Errorf("a message that the relay sends cannot be read: %w", err)
		}
		for _, text := range e.Orders {
			id, err := orders.ParseID(text)
			if err != nil {
				return nil, fmt.Errorf("a message that the relay sends has an order that is none of ours: %w", err)
			}
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// lose counts a timed message and reports whether it is lost; its orders are then noted.
func (g *goBetween) lose(ids []int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	number := g.messages
	g.messages++
	if number < g.next {
		return false
	}
	g.lost++
	g.next = int((float64(g.lost) + g.rng.Float64()) / g.share)
	for _, id := range ids {
		g.orders[id] = true
	}
	return true
}

// arrived notes that the orders have a message which got through.
func (g *goBetween) arrived(ids []int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, id := range ids {
		if g.orders[id] {
			g.orders[id] = false
		}
	}
}

// Telemetry carries the stream on which a proxy keeps what it knows of a client.
func (g *goBetween) Telemetry(client grpc.BidiStreamingServer[v2.TelemetryCommand, v2.TelemetryCommand]) error {
	ctx, cancel := context.WithCancel(onwards(client.Context()))
	defer cancel()
	proxy, err := g.proxy.Telemetry(ctx)
	if err != nil {
		return err
	}
	go func() { // ends when the client has ended its half, or with the return of this call
		for {
			cmd, err := client.Recv()
			if errors.Is(err, io.EOF) {
				_ = proxy.CloseSend() // the other half says what becomes of the stream
				return
			}
			if err != nil || proxy.Send(cmd) != nil {
				cancel()
				return
			}
		}
	}()
	for {
		cmd, err := proxy.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := client.Send(cmd); err != nil {
			return err
		}
	}
}

// Heartbeat sends on.
func (g *goBetween) Heartbeat(ctx context.Context, req *v2.HeartbeatRequest) (*v2.HeartbeatResponse, error) {
	return g.proxy.Heartbeat(onwards(ctx), req)
}

// RecallMessage sends on.
func (g *goBetween) RecallMessage(ctx context.Context, req *v2.RecallMessageRequest) (*v2.RecallMessageResponse, error) {
	return g.proxy.RecallMessage(onwards(ctx), req)
}

// NotifyClientTermination sends on.
func (g *goBetween) NotifyClientTermination(ctx context.Context, req *v2.NotifyClientTerminationRequest) (*v2.NotifyClientTerminationResponse, error) {
	return g.proxy.NotifyClientTermination(onwards(ctx), req)
}

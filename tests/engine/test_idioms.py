"""What programs for PyTorch write: its values and gradients, or an error; never other values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from clcomm.base.errors import ClcommError
from clcomm.engine import Tensor, nn
from clcomm.engine import functional as F
from tests.engine.values import drawn

#: With x [3, 4] and y [3, 4] of floats, m [3, 4] of booleans, i [5] of indices, c [3] of classes, b [2, 3, 4], v [4].
IDIOMS = (
    "x + y", "x - 1", "2 * x", "1 / x", "x / y", "-x", "x ** 2", "x.pow(3)", "2 ** x", "x @ y.T", "x.T", "x.t()",
    "abs(x)", "x + v", "x * v", "x / v", "v + x", "b + v", "b * x", "b @ x.T", "b.matmul(x.t())", "x.mm(y.t())",
    "b.bmm(b.transpose(1, 2))", "x.exp()", "x.abs().log()", "x.abs().sqrt()", "x.sin()", "x.cos()", "x.tanh()",
    "x.sigmoid()", "x.relu()", "x.erf()", "x.square()", "x.abs().rsqrt()", "x.clamp(-0.5, 0.5)", "x.clamp(min=0)",
    "x.clamp(max=0.1)", "x.sum()", "x.sum(1)", "x.sum(dim=1)", "x.sum(dim=(0, 1))", "x.sum(-1, keepdim=True)",
    "x.mean()", "x.mean(0)", "x.mean(dim=-1, keepdim=True)", "x.std()", "x.std(1)", "x.var(0)",
    "x.var(dim=1, unbiased=False)", "x.var(1, keepdim=True)", "x.max()", "x.max(1)", "x.max(dim=1)[0]", "x.max(1)[1]",
    "x.min(0, keepdim=True)[0]", "x.argmax(1)", "x.argmax(dim=1, keepdim=True)", "x.argmin()", "x.prod()", "x.prod(1)",
    "x.norm()", "x.norm(dim=1)", "x.norm(1)", "x.cumsum(1)", "x.cumsum(dim=0)", "x.softmax(1)", "x.softmax(dim=-1)",
    "x.log_softmax(1)", "x.logsumexp(1)", "x.sort()", "x.sort(dim=1, descending=True)", "x.topk(2)",
    "x.topk(2, dim=1)[1]", "x.argsort(1)", "x.sort(0)[1]", "x > 0", "x >= y", "x == x", "x != y", "x.eq(x)",
    "(x > 0).sum()", "(x > 0).float().mean()", "(x > 0) & m", "~m", "m | (y < 0)", "m.sum(1)", "m.float()", "m.int()",
    "m.any()", "m.all(1)", "x.bool()", "(x.argmax(1) == c).sum()", "x.masked_fill(m, 0.0)",
    "x.masked_fill(m, float('-inf')).softmax(1)", "F.where(m, x, y)", "x * m", "x[m]", "x[m].sum()", "x[0]", "x[:, 1]",
    "x[:, -1:]", "x[1:, ::2]", "x[..., None]", "x[None]", "x[-1]", "b[:, 1, :]", "b[0, 1]", "x[[0, 2]]",
    "x[F.to_int(c)]", "x[c]", "x.index_select(0, c)", "x.gather(1, c.unsqueeze(1))",
    "x.gather(1, c.view(-1, 1)).squeeze(1)", "x.view(-1)", "x.view(2, 6)", "x.view(3, -1)", "x.reshape(4, 3)",
    "x.reshape((12,))", "x.flatten()", "b.flatten(1)", "b.flatten(start_dim=1)", "b.view(2, -1)", "b.permute(2, 0, 1)",
    "b.transpose(0, 2)", "b.transpose(-1, -2)", "x.unsqueeze(0)", "x.unsqueeze(-1)", "x.unsqueeze(1).squeeze(1)",
    "x[None].squeeze()", "x.unsqueeze(0).expand(5, 3, 4)", "v.expand(3, 4)", "v.expand(3, -1)",
    "x.contiguous().view(-1)", "x.view_as(y)", "v.expand_as(x)", "x.clone()", "x.detach()", "x.detach() * x",
    "x.chunk(2, 1)", "x.chunk(2, dim=1)[1]", "x.split(2, dim=1)", "x.split([1, 3], 1)[1]", "F.cat([x, y], 0)",
    "F.cat((x, y), dim=1)", "F.stack([x, y])", "F.stack([x, y], dim=1)", "x.tril()", "x.triu(1)", "F.one_hot(c, 5)",
    "F.einsum('ij,kj->ik', x, y)", "F.maximum(x, y)", "F.minimum(x, y)", "x.dim()", "x.numel()", "x.shape[0]",
    "len(x)", "x.ndim", "x.sum().item()", "float(x.sum())",
    "int(x[0, 0] * 100)", "f'{x.mean():.3f} {c[1]:03d}'", "[3, 4, 5][c[1]]", "list(range(c[0]))", "float(x[:1, 0])",
    "c.tolist()", "x.size(0)", "x.size()", "x.T.shape", "x.long()",
    "c.float() / 2", "c / 2", "c // 2", "c + 1", "c * 2", "i % 2", "x % 2", "x // 1", "x.round()", "x.floor()",
    "x.add(y)", "x.sub(1)", "x.mul(2)", "x.div(2)", "x.neg()", "x.repeat(2, 1)", "x.flip(0)", "x.roll(1, 0)",
    "x.median()", "x.isnan()", "x.isfinite()", "x.type()", "x.unbind(0)", "x.unfold(1, 2, 1)",
    "x.scatter(1, c.view(-1, 1), 1.0)", "x.nonzero()", "x.outer(x)", "v.dot(v)", "x.addmm(x, y)", "x.new_zeros(3)",
    "x.sum(dtype=None)", "x.cpu()", "x.data", "F.relu(x)", "F.relu(x, inplace=True)", "F.softmax(x, dim=1)",
    "F.log_softmax(x, dim=1)", "F.softmax(x, 1)", "F.gelu(x)", "F.gelu(x, approximate='tanh')", "F.elu(x)",
    "F.leaky_relu(x, 0.2)", "F.softplus(x)", "F.silu(x)", "F.mish(x)", "F.hardswish(x)", "F.relu6(x)", "F.hardtanh(x)",
    "F.normalize(x, dim=1)", "F.dropout(x, 0.5, False)", "F.dropout(x, training=False)", "F.dropout(x, p=0.0)",
    "F.layer_norm(x, (4,))", "F.layer_norm(x, [4], v, v)", "F.cross_entropy(x, c)",
    "F.cross_entropy(x, c, reduction='sum')", "F.cross_entropy(x, c, label_smoothing=0.1)",
    "F.cross_entropy(x, c, weight=v.abs())", "F.cross_entropy(x, y.softmax(1))",
    "F.nll_loss(F.log_softmax(x, dim=1), c)", "F.nll_loss(x, c, reduction='none')", "F.mse_loss(x, y)",
    "F.l1_loss(x, y)", "F.mse_loss(x, y, reduction='sum')", "F.smooth_l1_loss(x, y)", "F.huber_loss(x, y, delta=0.5)",
    "F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach())", "F.binary_cross_entropy_with_logits(x, m.float())",
    "F.kl_div(x.log_softmax(1), y.softmax(1).detach(), reduction='batchmean')", "F.pad(x, (1, 1))",
    "F.pad(x, (1, 2, 0, 1), value=3.0)", "F.pad(x, [(0, 0), (1, 1)])", "F.linear(x, y)", "F.linear(x, y, x[:, 0])",
    "F.embedding(i, x)", "F.embedding(c, x)", "F.avg_pool2d(b[None], 2)", "F.max_pool2d(b[None], 2)",
    "F.max_pool2d(b[None], (3, 2), stride=1, padding=1)", "F.interpolate(b[None], scale_factor=2)",
    "F.interpolate(b[None], size=(5, 7), mode='bilinear', align_corners=False)",
    "F.scaled_dot_product_attention(b, b, b)", "F.scaled_dot_product_attention(b, b, b, is_causal=True)",
    "F.cosine_similarity(x, y)", "F.scaled_dot_product_attention(b, b, b, attn_mask=m[:, :3])",
    "F.batch_norm(x, None, None, training=True)", "F.prelu(x, v[:1].abs())", "F.group_norm(b, 3)", "F.tanh(x)",
    "F.sigmoid(x)", "F.logsigmoid(x)", "F.threshold(x, 0.1, 20)", "F.glu(x)", "F.one_hot(c)",
    "F.adaptive_avg_pool2d(b[None], 1)", "F.adaptive_avg_pool2d(b[None], (1, 2))",
    "F.pixel_shuffle(b.view(1, 4, 2, 3)[:, :, :2, :2], 2)", "F.cross_entropy(b, c[None].expand(2, 3))",
    "F.cross_entropy(x.unsqueeze(2).expand(3, 4, 2), c.unsqueeze(1).expand(3, 2))", "nn.ReLU()(x)",
    "nn.ReLU(inplace=True)(x * 1)", "nn.Softmax(dim=1)(x)", "nn.LogSoftmax(dim=1)(x)", "nn.Flatten()(b)",
    "nn.Identity()(x)", "nn.CrossEntropyLoss()(x, c)", "nn.CrossEntropyLoss(ignore_index=1)(x, c)",
    "nn.CrossEntropyLoss(weight=v.abs())(x, c)", "nn.CrossEntropyLoss(reduction='none')(x, c)", "nn.MSELoss()(x, y)",
    "nn.MSELoss(reduction='sum')(x, y)", "nn.NLLLoss()(x, c)", "nn.L1Loss()(x, y)",
    "nn.BCELoss()(x.sigmoid(), m.float())", "nn.BCEWithLogitsLoss()(x, m.float())", "nn.SmoothL1Loss()(x, y)",
    "nn.HuberLoss()(x, y)", "nn.KLDivLoss(reduction='batchmean')(x.log_softmax(1), y.softmax(1).detach())",
    "nn.LayerNorm(4)(x)", "nn.BatchNorm1d(4)(x)", "nn.GroupNorm(3, 3)(b)", "nn.InstanceNorm1d(3)(b)",
    "nn.Dropout(0.0)(x)", "nn.Dropout(0.5).eval()(x)", "nn.AdaptiveAvgPool1d(2)(b)", "nn.MaxPool1d(2)(b)",
    "nn.AvgPool1d(2, 1)(b)", "nn.Upsample(scale_factor=2)(b)", "nn.PReLU()(x)", "nn.Unflatten(1, (2, 2))(x)",
    "nn.Softplus(beta=2)(x)", "nn.Hardtanh(-0.1, 0.2)(x)", "nn.CosineSimilarity()(x, y)", "nn.Threshold(0, 1)(x)",
    "c - 1", "1 - c", "c * c", "-c", "c + 0.5", "c + x[:, 0]", "5 // c.add(1)", "c % 2", "x // 2", "x % 0.3",
    "x % -0.3", "c.sum()", "c.max()", "c.min()", "m.expand(2, 3, 4)", "F.cat([c, c])", "F.stack([c, c], 1)",
    "c.repeat(2)", "c.view(-1, 1).expand(3, 2)", "c.split(2)", "c.chunk(2)", "b.size(-1)", "b.numel()", "x.size()[0]",
    "x.repeat(2, 3)", "v.repeat(2, 1)", "x.flip(0, 1)", "x.flip([1])", "x.roll(-1, 1)", "x.roll(5)",
    "x.roll((1, 2), (0, 1))", "b.unbind(1)[2]", "x.narrow(1, 1, 2)", "b.flatten(0, 1)", "b.flatten(1, 2)", "x.ceil()",
    "x.trunc()", "x.sign()", "x.abs().log1p()", "x.reciprocal()", "(x / 0).isinf()", "(x / 0).isnan()", "v.outer(v)",
    "v.unsqueeze(0).mm(x.t())", "x.maximum(y)", "x.type_as(y)", "x.to(y)", "c.type_as(x)", "x.new_ones(2, 3)",
    "x.new_full((2,), 7.0)", "x.var(1, unbiased=False)", "x.std(unbiased=False)", "x[:, [0, 2]]", "x[:, [-1]]",
    "x[1:, c]", "b[:, [0, 2], 1]", "F.normalize(x, p=1, dim=0)", "F.normalize(b, dim=-1)",
    "F.cosine_similarity(x, y, dim=0)", "F.glu(x, 1)", "F.threshold(x, 0.0, -1.0)",
    "F.pad(b[None], (1, 1, 2, 1), mode='reflect')", "F.meshgrid(v, v, indexing='ij')[1]",
    "F.pad(b[None], (2, 1, 0, 1), mode='replicate')", "F.pad(b, (2, 1), mode='circular')", "F.pad(c, (1, 1), value=7)",
    "nn.ReflectionPad2d(1)(b[None])", "nn.ReplicationPad2d((1, 0, 2, 1))(b[None])", "nn.ZeroPad2d(1)(b[None])",
    "nn.LogSigmoid()(x)", "nn.GLU()(x)", "nn.ReflectionPad1d(2)(b)", "nn.ConstantPad2d(1, 3.5)(b[None])",
    "nn.CosineSimilarity(dim=0)(x, y)", "x.clone().add_(1)", "x.clone().mul_(2).sub_(y)", "x.clone().fill_(2)",
    "x.clone().zero_()", "x.clone().clamp_(-0.2, 0.2)", "x.clone().masked_fill_(m, 1.0)", "x.clone().copy_(y)",
    "x.median(1)", "x.median(dim=0, keepdim=True)", "b.unfold(2, 3, 1)", "x.scatter_add(1, c.view(-1, 1), y)",
    "x.scatter(1, c.view(-1, 1), y)", "x.scatter(0, c.view(1, -1), 2)", "F.pad(c, (2, 1))", "x.mean(1, dtype=None)",
    "F.unfold(b[None], (2, 3), padding=1)", "nn.AdaptiveMaxPool1d(2)(b)", "nn.MaxPool3d(2)(b[None, None])",
    "(x * 1).div_(3)", "(x * 2).add_(y, alpha=0.5)",
    "x.mT", "x.masked_select(m)", "F.bmm(b, b.transpose(1, 2))", "F.allclose(x, x)", "F.equal(x, x)",
    "F.tensor_split(x, 2, 1)", "x.diff()", "F.logaddexp(x, y)", "x.amax(1)", "x.amin(0)", "F.var_mean(x)",
    "F.std_mean(x, 1)", "x.argwhere()", "F.bincount(c)", "c.unique()", "(x@x.T).diag()", "F.diag(v)", "F.diagonal(x)",
    "(x@x.T).trace()", "x.cumprod(1)", "x.clone().index_add_(0, c, y)", "x.index_add(0, c, y)",
    "x.index_fill(0, c[:2], 1.0)", "x.expm1()", "x.abs().log2()", "x.abs().log10()", "x.tan()", "x.atan()",
    "F.atan2(x, y)", "x.clamp(-.9, .9).asin()", "x.sinh()", "x.cosh()", "x.frac()", "x.lerp(y, 0.5)",
    "F.lerp(x, y, 0.5)", "x.addcmul(y, y, value=2.0)", "x.addcdiv(y, y.abs()+1)", "x.movedim(0, 1)",
    "x.swapaxes(0, 1)", "F.hstack([x, y])", "F.vstack([x, y])", "x.unflatten(1, (2, 2))", "x.ravel()", "x.tile(2, 1)",
    "F.tile(x, (2, 1))", "x.repeat_interleave(2, 0)", "F.repeat_interleave(x, 2, dim=1)", "x.select(1, 0)",
    "x.take_along_dim(c.view(-1, 1), 1)", "F.cross(x[:, :3], y[:, :3], dim=1)", "F.triplet_margin_loss(x, y, x*2)",
    "F.selu(x)", "F.celu(x)", "F.softsign(x)", "F.tanhshrink(x)", "F.softmin(x, 1)", "F.poisson_nll_loss(x, y.abs())",
    "F.gaussian_nll_loss(x, y, y.abs()+1)", "F.multi_margin_loss(x, c)", "F.local_response_norm(b[None], 2)",
    "F.lp_pool2d(b[None], 2, 2)", "F.fold(F.unfold(b[None], (2, 2)), (3, 4), (2, 2))", "nn.SELU()(x)", "nn.CELU()(x)",
    "nn.Softsign()(x)", "nn.Tanhshrink()(x)", "nn.Softmin(1)(x)", "nn.Hardshrink()(x)", "nn.Softshrink()(x)",
    "nn.Softmax2d()(b[None])", "nn.AlphaDropout(0.0)(x)", "nn.LPPool2d(2, 2)(b[None])",
    "nn.LocalResponseNorm(2)(b[None])", "nn.PairwiseDistance()(x, y)", "nn.L1Loss(reduction='none')(x, y)",
    "F.clamp_min(x, 0)", "x.clamp_min(0.0)", "x.clamp_max(0.1)", "x.fmod(2)", "x.pow(2.0)", "F.pow(2.0, x)",
    "x ** y.abs()", "F.pow(x.abs(), y)", "x.rsub(1)", "x.new_full((2, ), 3.0)", "F.cdist(x, y)", "F.dist(x, y)",
    "x.quantile(0.5)", "x.kthvalue(2, 1)", "F.searchsorted(v.sort()[0], x)", "F.bucketize(x, v.sort()[0])",
    "x.count_nonzero()", "F.nan_to_num(x)", "x.nansum()", "F.rot90(x)", "F.outer(v, v)", "F.ger(v, v)", "F.mv(x, v)",
    "F.addmm(x@x.T, x, x.T)", "F.tensordot(x, y, dims=2)", "F.matmul(x, v)", "x@y.T", "F.einsum('ij, ij->i', x, y)",
    "F.broadcast_tensors(x, v)[1]", "x.squeeze(-1)", "F.cartesian_prod(v, v)", "F.block_diag(x, y)",
    "F.meshgrid(v, v, indexing='ij')[0]", "F.stack([x, y], -1)", "F.dstack([x, y])", "F.column_stack([x, y])", "c & 1",
    "c | 1", "c ^ 1", "c << 1", "~c", "c.float().mean()", "c.sort()[0]", "c == 1", "c.add(1)", "c.clone().add_(1)",
    "x.masked_fill(c.view(-1, 1)==0, 0.0)", "x.F.contiguous()", "x.is_contiguous()", "x.stride()",
    "x.is_floating_point()", "x.element_size()", "x.nelement()", "x.ndimension()", "x.float()",
    "x.numpy()", "[r for r in x][0]", "x.sum(-1).max()", "F.cosine_embedding_loss(x, y, (v[:3] > 0).float() * 2 - 1)",
    "F.margin_ranking_loss(x[:, 0], y[:, 0], (v[:3] > 0).float() * 2 - 1, 0.3)",
    "F.hinge_embedding_loss(x, m.float() * 2 - 1)", "F.soft_margin_loss(x, m.float() * 2 - 1)",
    "F.triplet_margin_loss(x, y, x.flip(0), margin=2.0, swap=True)", "F.poisson_nll_loss(x, y.abs() * 3, full=True)",
    "F.poisson_nll_loss(x.abs(), y.abs(), log_input=False)", "F.gaussian_nll_loss(x, y, x.abs(), full=True)",
    "F.multi_margin_loss(x, c, p=2, margin=0.5)", "nn.TripletMarginLoss(swap=True)(x, y, x * 2)",
    "nn.MultiMarginLoss()(x, c)", "nn.PoissonNLLLoss()(x, y.abs())", "nn.GaussianNLLLoss()(x, y, y.abs())",
    "nn.CosineEmbeddingLoss(0.1)(x, y, m[:, 0].float() * 2 - 1)", "nn.HingeEmbeddingLoss()(x, m.float() * 2 - 1)",
    "nn.SoftMarginLoss()(x, m.float() * 2 - 1)", "nn.MarginRankingLoss(0.2)(x, y, m.float() * 2 - 1)",
    "nn.Fold((3, 4), 2)(F.unfold(b[None], 2))", "nn.Unfold(2, padding=1)(b[None])",
    "F.fold(F.unfold(b[None], (2, 3), padding=1), (3, 4), (2, 3), padding=1)",
    "F.fold(F.unfold(b[None], 2, stride=(1, 2)), (3, 4), 2, stride=(1, 2))",
    "F.grid_sample(b[None], (x[:, :2] / 3)[None, :, None], align_corners=True)",
    "F.grid_sample(b[None], x[:, :2][None, :, None], padding_mode='border', align_corners=False)",
    "F.grid_sample(b[None] * v, y[:, :2][None, :, None], mode='nearest', align_corners=False) * x[0, 0]",
    "F.grid_sample(b[None], x[:, :2][None, :, None], align_corners=False)",
    "F.affine_grid(x[None, :2, :3], (1, 2, 3, 4), align_corners=False)",
    "F.affine_grid(x[None, :2, :3], [1, 2, 3, 4], align_corners=True)", "x.clone().exp_()", "x.clone().abs_().sqrt_()",
    "x.clone().pow_(2)", "x.clone().relu_()", "x.clone().tanh_()", "x.clone().round_()", "x.clone().lerp_(y, 0.3)",
    "x.clone().addcmul_(y, y, value=0.5)", "x.clone().index_fill_(1, c[:1], 3.0)", "x.clone().div_(y)",
    "x.clone().scatter_add_(1, c.view(-1, 1), y)", "x.clone().clamp_(min=0)", "c.clone().mul_(3)", "(c << 2) >> 1",
    "c & c.flip(0)", "c.sort(descending=True)[1]", "c.sort()[1]", "x.amax((0, 1))", "x.amax()",
    "b.amin((0, 2), keepdim=True)", "(x * 0).amax(1)", "x.kthvalue(1)[1]", "x.quantile(0.3, dim=1)",
    "x.quantile(0.75, 0, True)", "x.cumprod(0)", "b.cumprod(2)", "(x * 0).cumprod(1)", "F.tensor_split(x, (1, 3), 1)",
    "F.tensor_split(x, 2)", "b.movedim((0, 1), (2, 0))", "b.movedim(2, 0)", "b.unflatten(2, (-1, 2))",
    "x.repeat_interleave(c + 1, 0)", "x.repeat_interleave(3)", "x.take_along_dim(c.view(-1, 1), dim=1)",
    "x.index_add(1, c[:2], y[:, :2], alpha=2)", "F.diag(v, 1)", "F.diag(x @ x.T, -1)", "b.diagonal(0, 1, 2)",
    "b.diagonal(offset=1, dim1=1, dim2=2)", "x.diag()", "F.diag_embed(x)", "F.diag_embed(x, 1)",
    "F.addmm(v[:3], x, y.T, beta=0.5, alpha=2)", "F.baddbmm(b, b, x.expand(2, 3, 4).transpose(1, 2) @ b)",
    "F.tensordot(b, b, dims=([1, 2], [1, 2]))", "F.tensordot(x, y, dims=([1], [1]))", "F.cdist(b, b[:, :2])",
    "F.cdist(x, y, p=1)", "F.dist(x, y, 1)", "F.pairwise_distance(x, y)",
    "F.pairwise_distance(x, y, p=1, keepdim=True)", "F.nan_to_num(x / 0)", "F.nan_to_num(x.log(), nan=-1)",
    "(x / 0).nansum()", "x.log().nansum(1)", "F.logaddexp(x, v)", "x.atan2(y)", "F.atan2(v, x)", "x.abs() ** v",
    "F.pow(x.abs(), v)", "3 ** x", "(-2.0) ** c.float()", "x.fmod(-0.3)", "x.lerp(y, m.float())",
    "F.isclose(x, x + 1e-7)", "x.allclose(y)", "x.equal(y)", "F.rot90(x, 2)", "F.rot90(b, -1, (1, 2))",
    "F.searchsorted(v.sort()[0], x, right=True)", "c.bincount(minlength=5)", "c.bincount(weights=v[:3])",
    "c.unique(return_counts=True)", "c.flip(0).unique(return_inverse=True)", "F.var_mean(b, (0, 2))", "F.std_mean(x)",
    "F.celu(x, 0.5)", "F.softshrink(x, 0.1)", "F.hardshrink(x, 0.2)", "F.local_response_norm(b[None], 3, alpha=0.5)",
    "F.lp_pool2d(b[None].abs(), 2, 2, 1)", "b.stride(0)", "x.isnan().any()", "F.block_diag(x, v, y)",
    "F.hstack([v, v])", "F.dstack([v, v])", "F.vstack([v, x])", "F.column_stack([v, v])",
    "x[x > 99]", "x[x > 99].sum()", "x[x > 99].mean()", "x[:0] * 2", "F.cat([x[:0], x])",
    "F.cat([x[x > 99], y * x], 1)", "x[:, :0].sum(1)", "x[:, :0].mean(1)", "x[:0].sum(0)", "x[:0].t()",
    "x[:0].view(-1)", "x[:0].view(-1, 2)", "(x[:0] + v).exp().sum()", "x[3:].shape", "len(x[3:])", "x[:0].tolist()",
    "x[c[:0]]", "x[:0].any()", "x[:0].all()", "x[:0].unsqueeze(0)", "x.split([0, 4], 1)[1]", "x.split([0, 4], 1)[0]",
    "x.new_zeros(0)", "F.stack([x[:0], x[:0]])", "x[:0].masked_fill(m[:0], 1.0)", "F.where(m[:0], x[:0], y[:0])",
    "x.index_select(0, c[:0])", "x[:0].norm()", "x[x > 99].numel()", "x[:0].permute(1, 0).flatten()", "F.relu(x[:0])",
    "x[:0] == y[:0]", "c[:0] + 1", "c[:0].sum()", "c[c > 9].float()", "x[:0].expand(2, 0, 4)",
    "[row for row in x[:0]]", "x[:0].detach()", "x[:0].clone()", "x[:0].max()", "x[:0].argmax()",
    "x[:0].nonzero()", "(x > 99).nonzero()", "x[:0].maximum(y[:0])", "x[:0] ** y[:0]", "F.dropout(x[:0], 0.5)",
    "F.masked_select(x, x > 99)", "x.scatter_add(1, c[:0].view(0, 1), y)",
    "x.eq(y)", "x.gt(0)", "x.lt(y)", "x.ge(0.1)", "x.le(y)", "x.ne(x)", "F.gt(x, y)", "(x > 0).logical_and(m)",
    "(x > 0).logical_not()", "x.negative()", "F.neg(x)", "F.reciprocal(x)", "x.clip(-0.1, 0.3)", "x.multiply(y)",
    "x.subtract(1)", "x.divide(2)", "x.true_divide(y)", "x.clone().neg_()", "x.clone().clip_(0, 0.5)",
    "x.remainder(0.3)", "x.floor_divide(0.5)", "F.nonzero(m)", "F.ravel(b)", "F.permute(b, (2, 0, 1))",
    "F.swapaxes(b, 0, 2)", "F.moveaxis(b, 0, 2)", "F.concatenate([x, y], dim=1)", "F.flipud(x)", "F.fliplr(x)",
    "x.exp2()", "x.erfc()", "F.hypot(x, y)", "x.sigmoid().logit()", "F.logit(x, eps=0.1)", "F.xlogy(x * m, y.abs())",
    "F.inner(x, y)", "F.inner(v, v)", "F.kron(x, y)", "F.addmv(v[:3], x, v)", "F.pdist(x)", "F.pdist(x, p=1)",
    "F.isin(c, c[:2])", "F.atleast_2d(v)", "F.atleast_3d(x)", "F.hsplit(x, 2)", "F.vsplit(b, 2)",
    "F.channel_shuffle(b.view(1, 4, 2, 3), 2)", "F.instance_norm(b)", "F.instance_norm(b, weight=v[:3], bias=v[1:])",
    "F.dropout2d(b[None], 0.5, False)", "F.multilabel_soft_margin_loss(x, m.float())",
    "F.multilabel_soft_margin_loss(x, m.float(), weight=v.abs())", "F.upsample(b[None], scale_factor=2)",
    "nn.CircularPad2d(1)(b[None])", "nn.CircularPad1d((1, 2))(b)", "nn.UpsamplingNearest2d(scale_factor=2)(b[None])",
    "nn.UpsamplingBilinear2d(size=(5, 7))(b[None])", "nn.ChannelShuffle(2)(b.view(1, 4, 2, 3))",
    "F.gumbel_softmax(x * 0 + m.float() * 1e4, hard=True) * 0", "x.arctan()", "x.broadcast_to((2, 3, 4))",
    "x * v.cos() + F.cat((-x[..., 2:], x[..., :2]), dim=-1) * v.sin()",
    "F.stack((b[..., ::2] * v[:2] - b[..., 1::2] * v[2:], b[..., ::2] * v[2:] + b[..., 1::2] * v[:2]), -1).flatten(-2)",
    "F.softmin(b)", "F.softmin(b[None])", "nn.Softmin()(b)", "F.cross(x[:, :3], y[:, :3])", "F.cross(b, b + 1)",
)  # fmt: skip
#: Assignments: x, of which they are made, is no leaf.
ASSIGNED = (
    "x[0] = 1.0", "x[:, 1] = y[:, 0]", "x[m] = -1.0", "x[c] = 2.0", "x[1:, ::2] = y[1:, ::2]", "x[..., -1] *= 3",
    "x[:, [0, 2]] = 0.0", "x[0, 1] = y[2, 2]", "x[x < 0] = 0.0", "x[:2] += y[:2]", "x[[0, 2]] = y[[1, 1]]", "x[:] = v",
    "x[1] = v", "x[x > 99] = 1.0", "x[:0] = y[:0]", "x[c[:0]] = y[:0]", "x += v", "x *= y", "x[None] = 5.0",
)  # fmt: skip


def values(given):
    if isinstance(given, (tuple, list)):
        return list(itertools.chain.from_iterable(map(values, given)))
    array = given.detach().numpy() if hasattr(given, "detach") else np.array(given)
    return [np.asarray(array)]


def outcome(text, library, functional, make):
    """Return the values of the text, and the gradients of x, or the error."""
    rng = np.random.default_rng(5)
    shapes = {"x": (3, 4), "y": (3, 4), "b": (2, 3, 4), "v": (4,)}
    names = {name: make(drawn(number, *shape)) for number, (name, shape) in enumerate(shapes.items())}
    names["x"].requires_grad = True
    names.update(m=make(rng.random((3, 4)) < 0.5), i=make(np.array([0, 2, 1, 1, 0])), c=make(np.array([2, 0, 1])))
    try:
        result = eval(text, {"nn": library, "F": functional, **names})
        found = values(result)
        if getattr(result, "requires_grad", False):
            (result * make(drawn(9, *result.shape))).sum().backward()
            found += values(names["x"].grad) if names["x"].grad is not None else []
    except Exception as error:
        return error, None
    return None, found


class _Functional:
    """PyTorch's functions of both of its modules."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        if name == "to_int":
            return lambda t: t.long()
        found = getattr(self._torch.nn.functional, name, None)
        return getattr(self._torch, name) if found is None else found


@pytest.mark.filterwarnings("ignore")
def test_no_idiom_has_other_values_than_pytorchs(torch):
    assert len(IDIOMS) == len(set(IDIOMS)) > 600
    silent, refused = [], set()
    for text in IDIOMS:
        error, ours = outcome(text, nn, F, Tensor)
        failure, theirs = outcome(text, torch.nn, _Functional(torch), torch.tensor)
        if error is not None:
            if not isinstance(error, (ClcommError, TypeError, AttributeError)) or "\n" in str(error):
                silent.append((text, error))
            if failure is None:
                refused.add(text)
        elif failure is not None:
            continue  # NumPy's way, which PyTorch refuses
        elif len(ours) != len(theirs) or not all(map(_is_close, ours, theirs)):
            silent.append(text)
    assert silent == [] and refused == set()


def _is_close(ours, theirs):
    if ours.dtype.kind == "U":
        return ours == theirs
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("text", ASSIGNED)
def test_assignments_have_pytorchs_values_and_gradients(torch, text):
    found = []
    for make in (Tensor, torch.tensor):
        names = {name: make(drawn(number, 3, 4)) for number, name in enumerate(("leaf", "y"))}
        for each in names.values():
            each.requires_grad = True
        names.update(v=make(drawn(5, 4)), c=make(np.array([2, 0, 1])), m=make(drawn(7, 3, 4) > 0))
        names["x"] = names["leaf"] * 1.5
        exec(text, names)
        (names["x"] * make(drawn(9, 3, 4))).sum().backward()
        found.append([names["x"].detach().numpy(), *[names[n].grad for n in ("leaf", "y")]])
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = [None if each is None else np.asarray(each if isinstance(each, np.ndarray) else each.numpy())
                        for each in (ours, theirs)]  # fmt: skip
        assert (theirs is None) or np.allclose(0 if ours is None else ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", [
    "x += 2", "x -= y", "x *= 3", "x /= 3", "x //= 0.3", "x %= 0.3", "x **= 2", "c //= 2", "c %= 2", "c <<= 2",
    "c >>= 1", "c &= 3", "c |= 4", "c ^= 5", "m &= n", "m |= n", "m ^= n", "c //= 0.5", "c **= 0.5",
])  # fmt: skip
def test_operators_in_place_write_to_what_all_names_have_or_are_refused(torch, text):
    found = []
    for make in (Tensor, torch.tensor):
        names = {name: make(drawn(number, 3, 4)) for number, name in enumerate("xy")}
        names.update(c=make(np.arange(6, 12)), m=make(drawn(7, 5) > 0), n=make(drawn(8, 5) > 0))
        same = names[text[0]].view(-1)
        try:
            exec(text, names)
            found.append(same.numpy())
        except (ClcommError, RuntimeError):
            found.append(None)
    ours, theirs = found
    assert (ours is None) == (theirs is None) and (ours is None or np.allclose(ours, theirs, rtol=1e-6))


def test_assignments_to_integers_and_what_they_refuse():
    c = Tensor(np.arange(6).reshape(2, 3))
    c[0, 1] = 9
    c[:, 2] = Tensor([7, 8])
    assert c.tolist() == [[0, 9, 7], [3, 4, 8]]
    assert c.gather(1, Tensor([[2], [0]])).tolist() == [[7], [3]] and c.index_select(1, [1]).tolist() == [[9], [4]]
    x, leaf = Tensor(np.zeros((2, 3))), Tensor(np.zeros(3), requires_grad=True)
    for assign, said in (
        (lambda: x.__setitem__(0, np.ones(3)), "expected a number or a Tensor, got ndarray"),
        (lambda: x.__setitem__(0, Tensor(np.ones(2))), r"expected a value of shape \(3,\), got \(2,\)"),
        (lambda: x.__setitem__(2, 1.0), "index 2 is out of bounds"),
        (lambda: c * 2**30, "integers must fit int32"),
        (lambda: (c * 2**27).sum(), "integers must fit int32"),
        (lambda: c.gather(1, Tensor([[0], [3]])), "expected indices from 0 to 2, got 3"),
        (lambda: c.index_select(0, Tensor([2])), "expected indices from 0 to 1, got 2"),
        (lambda: nn.init.uniform_(c), "uniform_: expected a float32 tensor, got int32"),
        (lambda: nn.init.normal_(c), "normal_: expected a float32 tensor, got int32"),
        (lambda: x.outer(x), "outer: expected two tensors of one dimension"),
        (lambda: leaf.__setitem__(0, 1.0), "got a leaf that needs a gradient"),
    ):
        with pytest.raises(ClcommError, match=said):
            assign()
